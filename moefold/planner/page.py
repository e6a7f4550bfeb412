"""A plan as one self-contained page: no network, no library, light and dark."""

import html
import json
from pathlib import Path

from moefold.planner.answer import Plan
from moefold.planner.page_data import drawn

TEMPLATE = Path(__file__).with_suffix(".html")


def page(plan: Plan, tokens: float) -> str:
    """Return the page.

    Args:
        plan: what it explains.
        tokens: of the whole run, for days, cost and energy.
    """
    data = drawn(plan, tokens)
    # Inside a script element nothing may look like the end of it, nor open a comment.
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    task, device = plan.task, plan.task.cluster.device.name
    title = f"{task.name} on {task.cluster.devices:,} {device}"
    text = TEMPLATE.read_text(encoding="utf-8").replace("__TITLE__", html.escape(title))
    return text.replace("__DATA__", packed)
