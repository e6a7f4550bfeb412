"""The examples of docs/extending.md and of README.md do what the pages say."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import moefold
from moefold.cli.main import main
from moefold.comm.world import World
from moefold.data.batch import from_ids
from moefold.layers.config import Selective
from moefold.model.decoder import DecoderModel
from moefold.moe.router import RoutingContext, TopKRouter
from moefold.spec.decoder import model_weights
from moefold.training.hooks.base import Hook
from moefold.training.run_folder import History
from tests.cpu.alive import bytes_alive, bytes_planned
from tests.cpu.hubs import decoder_of, on_disk, weights_of, write_hub, write_tokenizer
from tests.cpu.runs import corpus
from tests.examples import EXAMPLES, ROOT, blocks, written
from tests.outside import forget

QUIET = ["watch.evaluate=null", "watch.progress.style=off", "watch.checkpoint.every=null"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that examples share, so that their data is prepared once."""
    return tmp_path_factory.mktemp("examples")


def trained(folder: Path, name: str, *overrides: str) -> History:
    """Train an example for six steps in ``folder/name``; return what it wrote."""
    run = moefold.load_run(written(folder, name), ["train.steps=6", *QUIET, *overrides])
    out = folder / "runs" / "-".join([name, *overrides])
    moefold.train(run, folder=out)
    return History.read(out)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(prepared: Path, name: str) -> None:
    """Each part is chosen by its kind; the loss falls."""
    losses = [line["lm_loss"] for line in trained(prepared, name).lines]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.01


def test_the_page_has_a_part_of_each_sort() -> None:
    """No section loses its example."""
    used = " ".join(code for code, _ in EXAMPLES.values())
    assert all(f"@{slot}.register" in used for slot in (
        "BALANCE", "HOOKS", "OPTIMIZER", "LOSS", "SOURCE", "DISPATCH", "ROUTER", "MODEL",
        "ATTENTION"))  # fmt: skip


def test_the_term_and_the_hook_are_in_the_figures(prepared: Path, tmp_path: Path) -> None:
    """Under the names that the page gives."""
    lines = trained(tmp_path, "entropy.py").lines
    assert all(0 < line["router/entropy"] < 1.4 for line in lines)
    lines = trained(tmp_path, "router_norm.py").lines
    found = ["norm/layers.1.moe.router.weight" in line for line in lines]
    assert found == [False, True] * 3


def test_the_dispatcher_changes_nothing(tmp_path: Path) -> None:
    """Dropped copies and all: the loss is that of the package's own."""
    drops = "model.capacity={factor: 0.75}"
    for extra in ([], [drops]):
        plain = trained(tmp_path, "plain_dispatch.py", *extra)
        local = trained(tmp_path, "plain_dispatch.py", "layout.dispatch=local", *extra)
        one, other = ([line["lm_loss"] for line in h.lines] for h in (plain, local))
        assert one == pytest.approx(other, abs=1e-4)


def test_the_router_spreads_tokens(tmp_path: Path) -> None:
    """Of rows that all like the same experts it sends some elsewhere; its terms count."""
    run = moefold.load_run(written(tmp_path, "centred.py"))
    ffn: Any = run.decoder.blocks[0].ffn
    assert ffn.kind == "moe" and ffn.router.experts == 4 and ffn.router.kind == "centred"
    with moefold.open(run, tmp_path / "open") as job:
        router = next(mixture for _, mixture in job.model.moe_layers()).router
        logits_TE = torch.tensor([2.0, 1.0, 0.0, 0.0]) + torch.eye(4).repeat(16, 1)
        rows = from_ids(torch.zeros(1, 64, dtype=torch.int64))
        context = RoutingContext(router.record, None, rows, World.single().group("tp_cp"))
        scores_TE = logits_TE.softmax(1)
        assert (
            TopKRouter.choose(router, scores_TE, context).flatten().bincount(minlength=4)[2:].sum()
            == 0
        )
        assert router.choose(scores_TE, context).flatten().bincount(minlength=4).min() >= 16
        elsewhere = replace(context, training=False)
        assert torch.equal(
            router.choose(scores_TE, elsewhere), TopKRouter.choose(router, scores_TE, elsewhere)
        )
        assert "router/aux_micro_batch" in job.step()


def test_the_family_has_what_it_adds(tmp_path: Path) -> None:
    """A shared expert in each layer, and all else as in the family that it inherits from."""
    blocks = moefold.load_run(written(tmp_path, "shared_qwen.py")).decoder.blocks
    plain = moefold.load_run("tiny").decoder.blocks
    for block, other in zip(blocks, plain, strict=True):
        ffn: Any = block.ffn
        assert ffn.shared.width == ffn.width == 32
        plain_ffn: Any = other.ffn  # whose recipe names balance terms of its own
        assert ffn.model_copy(update={"shared": None, "balance": plain_ffn.balance}) == plain_ffn


FAMILY = """
from typing import Literal
from moefold.model.config import MODEL
from moefold.model.families.qwen3_moe import Qwen3Moe

@MODEL.register
class Own(Qwen3Moe):
    family: Literal["own_moe"] = "own_moe"
    model_type = "own_moe"
    architecture = "OwnMoeForCausalLM"
"""


def test_a_folder_of_an_own_family_is_trained_imported_and_grown(
    tmp_path: Path, capsys: Any
) -> None:
    """Its file is named as a run's is, or as a command's that has no run."""
    decoder, hub, part = decoder_of("qwen3_moe"), tmp_path / "hub", tmp_path / "family.py"
    fields = {"model_type": "own_moe", "architectures": ["OwnMoeForCausalLM"]}
    write_hub(hub, decoder, on_disk(decoder, weights_of(decoder)), **fields)
    write_tokenizer(hub, [f"word{number}" for number in range(30)])
    part.write_text(FAMILY)
    grown = ["grow", str(hub), str(tmp_path / "grown"), "--experts", "8"]
    imported = ["import", str(hub), str(tmp_path / "imported")]
    with pytest.raises(ValueError, match="model_type 'own_moe' is not known"):
        moefold.load_run(hub)
    assert main(imported) == main(grown) == 2
    capsys.readouterr()
    for words in (imported, grown):
        assert main([*words, "--uses", str(part), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["family"] == "own_moe"
        forget()
    run = moefold.load_run(hub, [f"uses=[{part}]"])
    assert run.decoder.blocks == decoder.blocks


def test_the_attention_is_what_its_record_describes(tmp_path: Path) -> None:
    """Names and shapes of its weights, and the bytes that it keeps, whatever is recomputed."""
    decoder = moefold.load_run(written(tmp_path, "gated_attention.py")).decoder
    model = DecoderModel(decoder, device="meta")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {weight.name: weight.shape for weight in model_weights(decoder)}
    block, some = decoder.blocks[0], Selective(modules=("norms", "attention", "experts"))
    for policy in (None, Selective(modules=("attention",)), some):
        assert bytes_alive(block, policy, "bf16") == bytes_planned(block, policy, "bf16"), policy


def test_a_checkpoint_names_parts_and_runs_none_of_their_code(tmp_path: Path, capsys: Any) -> None:
    """They are brought by who reads it, on the command line and in Python."""
    run, out = written(tmp_path, "entropy.py"), str(tmp_path / "out")
    moefold.train(moefold.load_run(run, ["train.steps=6", *QUIET]), folder=out)
    part = (tmp_path / "entropy.py").rename(tmp_path / "moved.py")
    forget()
    capsys.readouterr()
    assert main(["sample", out, "--prompt", "a", "--tokens", "2"]) == 2
    told = capsys.readouterr().err
    assert "--uses" in told and str(tmp_path / "entropy.py") in told and "aux, z" not in told
    with pytest.raises(ValueError, match="a run with plug-ins"):
        moefold.load_model(out)
    assert main(["sample", out, "--prompt", "a", "--tokens", "2", "--uses", str(part)]) == 0
    forget()
    assert main(["export", out, str(tmp_path / "hf"), "--uses", str(part)]) == 0
    forget()
    model = moefold.load_model(out, uses=[part])
    assert len(list(model.moe_layers())) == 2
    forget()
    assert moefold.export(out, tmp_path / "hf2", uses=[part])


def test_a_run_and_its_parts_may_move_and_not_change(tmp_path: Path) -> None:
    """What counts is the content of a file, wherever it lies."""
    out = tmp_path / "out"
    for folder, steps in (("one", 2), ("other", 4)):
        forget()
        (tmp_path / folder).mkdir()
        run = written(tmp_path / folder, "router_norm.py")
        data = f"data.train=[{{source: text, files: ['{corpus(tmp_path / 'c')}'], holdout: 0.2}}]"
        asked = [f"train.steps={steps}", data, *QUIET, "optim.schedule_lr=constant"]
        moefold.train(moefold.load_run(run, asked), folder=out)
    assert len(History.read(out).lines) == 4
    (tmp_path / "other" / "router_norm.py").write_text(EXAMPLES["router_norm.py"][0] + "\n")
    with pytest.raises(ValueError, match=r"uses: router_norm\.py"):
        moefold.train(moefold.load_run(run, asked), folder=out)


def test_the_readme_s_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as it stands, on a small corpus in place of the standard library."""
    monkeypatch.chdir(tmp_path)
    load_run = moefold.load_run
    small = f"data.train=[{{source: text, files: ['{corpus(tmp_path / 'c')}'], holdout: 0.2}}]"
    monkeypatch.setattr(
        moefold, "load_run", lambda s, overrides: load_run(s, [*overrides, small, *QUIET])
    )
    (code,) = blocks((ROOT / "README.md").read_text(), "python")
    names: dict[str, Any] = {}
    exec(code, names)
    result = names["result"]
    assert result.folder == Path("runs/tiny") and result.final["lm_loss"] < 6.3
    assert json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 10
    again = moefold.train(names["run"], folder=result.folder)
    assert again.final["lm_loss"] == result.final["lm_loss"], "what is at its end has figures too"


def tour_commands() -> list[list[str]]:
    """Commands with overrides that pages show: they must not be refused."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = re.findall(
        r"moefold train ((?:demo|tiny)(?: [\w.]+=\S+?)+)`", "".join(p.read_text() for p in pages)
    )
    return [line.split() for line in found]


@pytest.mark.parametrize("words", tour_commands(), ids=" ".join)
def test_overrides_that_pages_show_are_legal(words: list[str]) -> None:
    """They fit the recipe they are tried on."""
    assert moefold.load_run(words[0], words[1:])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: moefold.train("tiny"), "load_run"),  # type: ignore[arg-type]
        (lambda: moefold.load_model("x", dtype="fp32"), "float32, float64, bfloat16"),
        (lambda: moefold.load_run("tiny", "seed=2"), r"such as \['seed=2'\]"),
        (lambda: moefold.plan("tiny", "h100x1", overrides="seed=2"), r"such as \['seed=2'\]"),
        (lambda: moefold.verify(moefold.load_run("tiny"), "tp2"), r"such as \['tp2'\]"),
        (
            lambda: moefold.open(moefold.load_run("tiny"), hooks=cast(Any, [Hook])),
            "must be instances of subclasses of Hook",
        ),
    ],
)
def test_likely_slips_are_explained(call: Any, said: str) -> None:
    """In Python too, the message says what to do."""
    with pytest.raises((TypeError, ValueError), match=said):
        call()


def test_what_is_no_run_says_what_it_is(tmp_path: Path, capsys: Any) -> None:
    """A folder that is none, and a Hugging Face folder where a checkpoint belongs."""
    assert main(["train", str(tmp_path), "--dry-run"]) == 2
    assert "a folder without config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "moefold import" in capsys.readouterr().err
