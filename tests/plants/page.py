"""Planted bugs: the page that answers."""

from tests.plants.plant import Plant

FORM = "tests/pure/test_plan_form.py::"
PAGE = "tests/cpu/test_cli_plan_page.py::"
OWN_PAGE = PAGE + "test_only_its_own_page_is_answered"

PLANTS = (
    Plant(
        "a page under another name of this machine is served",
        OWN_PAGE,
        "planner/serve/server.py",
        'if LOCAL_NAME.fullmatch(self.headers.get("Host", "")):',
        'if LOCAL_NAME.match(self.headers.get("Host", "")):',
    ),
    Plant(
        "posts of other pages are answered",
        OWN_PAGE,
        "planner/serve/server.py",
        "(origin is None or origin.lower() == own)",
        "True",
    ),
    Plant(
        "the address needs no secret",
        OWN_PAGE,
        "planner/serve/server.py",
        "        if secrets.compare_digest(self.path.encode(), ",
        '        if self.path.endswith("/") or secrets.compare_digest(self.path.encode(), ',
    ),
    Plant(
        "an error is said of the field that was read last",
        FORM + "test_what_is_wrong_is_said_of_its_field",
        "planner/serve/form.py",
        "found = next((name for start, name in STARTS if message.startswith(start)), field)",
        "found = field",
    ),
    Plant(
        "the nearest legal number is that below",
        FORM + "test_what_is_wrong_is_said_of_its_field",
        "planner/serve/form.py",
        "format_value(most if value > 1 else 1)",
        "format_value(1)",
    ),
    Plant(
        "the length of a run is not asked for",
        FORM + "test_a_page_asks_what_its_command_asks",
        "planner/serve/form.py",
        """        stated.append(f"data.seq={texts['seq']}")""",
        "        pass",
    ),
    Plant(
        "nothing fits before the search is done",
        FORM + "test_nothing_is_said_to_be_missing_before_the_search",
        "planner/plan.py",
        "        if not self.complete:\n            return None\n",
        "",
    ),
    Plant(
        "a fragment is offered of what training does not execute",
        FORM + "test_a_fragment_is_offered_where_training_executes_the_layout",
        "planner/plan.py",
        '    if layout.unsupported:\n        raise ValueError(f"training does not support',
        '    if not layout:\n        raise ValueError(f"training does not support',
    ),
)
