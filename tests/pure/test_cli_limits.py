"""Sizes beyond any use: status 2 and the rule, without a loop or memory of that size."""

import json
import time
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.config.base import MOST, Record
from moefold.mesh.config import Sizes
from moefold.schedule.config import Interleaved

HUGE = "99999999999999999999"
REFUSED = {
    "explain tiny --world 10000000 train.batch=20000000": "1,000,000",
    "explain tiny --world 1099511627776": "1,000,000",
    "verify tiny --world 99999999999": "1,000,000",
    "bench --memory tiny --world 99999999999": "1,000,000",
    "explain tiny --layout pp2 train.batch=4611686018427387904": "at most 16777216",
    "explain tiny --layout tp99999999999999999999999": "tp2 pp2 ep4",
    "explain tiny --layout tp9999999": "1,000,000",
    "explain tiny --layout tp1000000,pp1000000": "1,000,000",
    "explain tiny model.shape.vocab=9223372036854775807": "at most 16777216",
    "explain tiny model.shape.experts=1000000": "at most 65536",
    "explain tiny model.shape.experts=65536 model.shape.layers=1000": "at most 1,048,576",
    "explain tiny model.shape.hidden=16000000 model.shape.experts=65000 "
    "model.shape.expert_width=4000000": "at most 2^45",
    "explain tiny data.tokenizer.vocab=100000000000": "at most 1048576",
    "explain tiny data.seq=1000000000": "at most 16777216",
    "explain tiny optim.lr=1e300": "at most 1e+30",
    "explain tiny train.steps=99999999999": "at most 2,147,483,647",
    "explain tiny model.router={kind:sinkhorn,rounds:99999999}": "at most 1000",
    "explain tiny layout.stages=Et*999999999|L": "10,000 letters",
    "plan tiny --cluster h100x8 --memory 1e300": "at most",
    f"plan tiny --cluster h100x8 --batch {HUGE}": "at most",
    f"plan mixtral_8x7b --cluster h100x8 --seq {HUGE}": "at most",
    "plan tiny --cluster h100x8 --price 1e300": "1e18",
    "plan tiny --cluster h100x99999999999": "1,000,000",
    "train tiny --nproc 1000000000": "at most 4096",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_size_beyond_use_is_refused_at_once(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.process_time()
    argv = [word.replace(",", " ") if "tp" in word else word for word in words.split()]
    argv = [word.replace("{kind:", "{kind: ").replace("rounds:", " rounds: ") for word in argv]
    try:
        status = main(argv)
    except SystemExit as end:  # of the parser of arguments
        status = end.code
    assert status == 2
    assert time.process_time() - started < 4
    assert REFUSED[words] in capsys.readouterr().err


def test_the_largest_sizes_are_answered_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.process_time()
    assert main(["explain", "tiny", "--world", "1000000", "train.batch=16777216"]) == 0
    assert main(["explain", "tiny", "--json", "--world", "1000000"]) == 0
    assert time.process_time() - started < 8
    answer = capsys.readouterr().out
    assert json.loads(answer[answer.index("\n{") :])["layout"]["groups"] is None


class Sample(Record):
    """Numbers without bounds of their own."""

    count: int = 0
    share: float | None = None
    listed: tuple[int, ...] = ()


def test_every_number_of_a_record_is_bounded() -> None:
    most = MOST["int"]
    assert Sample(count=most, share=-MOST["float"], listed=(most,)).count == most
    for wrong in ({"count": most + 1}, {"count": -most - 1}, {"listed": (most + 1,)}):
        with pytest.raises(ValueError, match=r"less|greater"):
            Sample.model_validate(wrong)
    with pytest.raises(ValueError, match="less"):
        Sample(share=1e31)


def test_the_nearest_number_of_micro_batches_is_found_without_a_search() -> None:
    for p, v, group in ((2, 2, None), (3, 2, 5), (4, 3, 9), (8, 2, 8)):
        schedule = Interleaved(group=group)
        size = max(p, group or p)
        legal = [n for n in range(1, 200) if n % size == 0 or n % size >= p]
        for m in range(1, 60):
            found = [x.nearest for x in schedule.violations(p, v, m) if x.path[-1] != "group"]
            near = min(legal, key=lambda n: (abs(n - m), -n))
            assert found == ([] if m in legal else [near]), (p, group, m)


def test_a_folder_that_states_a_million_experts(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 1_000_000,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    for experts in (1_000_000, 10**12):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": experts}))
        for words in (["explain", str(tmp_path)], ["grow", str(tmp_path), str(tmp_path / "x")]):
            started = time.process_time()
            assert main(words) == 2
            assert time.process_time() - started < 8


def test_axis_sizes_are_parsed_within_bounds() -> None:
    assert Sizes.parse("tp1000000").tp == 1_000_000
    for text in ("tp1000001", "tp" + "9" * 5000):
        with pytest.raises(ValueError, match=r"axis|more than"):
            Sizes.parse(text)
