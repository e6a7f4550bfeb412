"""Hooks that run the model: samples, and the page of experts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from moefold.data.batch import pack
from moefold.layers.flow import Flow
from moefold.training.hooks.config import Sample
from moefold.training.hooks.experts import choose_documents, record_routing
from moefold.training.hooks.sample import SampleHook, truncate_samples
from tests.cpu.runs import job_of


def test_samples_of_steps_that_are_made_again_go(tmp_path: Path) -> None:
    """What stands before stays to the byte; text that looks like a head inside a sample is safe."""
    path = tmp_path / "samples.txt"
    kept = "=== step 5 · 'a'\nab === step 99 · c\n\n=== step 10 · 'a'\nac\n\n"
    path.write_text(kept + "=== step 15 · 'a'\nad\n\n=== step 20 · 'a'\nae\n\n")
    truncate_samples(path, 12)
    assert path.read_text() == kept
    truncate_samples(path, 12)
    assert path.read_text() == kept
    truncate_samples(path, 0)
    assert path.read_text() == ""
    truncate_samples(tmp_path / "absent.txt", 0)
    assert [found.name for found in tmp_path.iterdir()] == ["samples.txt"]
    # Killed, or on a full disk, in the middle of a character.
    path.write_bytes(kept.encode() + "=== step 15 · 'a'\nä".encode()[:-1])
    truncate_samples(path, 12)
    assert path.read_text() == kept


def test_a_prompt_of_no_token_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """At the first sample it would cost all steps before."""
    hook = SampleHook(Sample(prompts=("a", "")), Console(quiet=True))
    with job_of(tmp_path, "out", hook) as job:
        job.tokenizer.head = ()
        with pytest.raises(ValueError, match=r"sample\.prompts: an empty prompt has no tokens"):
            job.train()
        assert job.step_number == 0


def test_the_page_is_told_what_the_router_decided(tmp_path: Path) -> None:
    """Experts and weights of the very choices, in the order of the tokens, over several passes."""
    with job_of(tmp_path, train={"batch": 4}) as job:
        pieces = [[i % 200 + 1 for i in range(n, n + 16)] for n in range(0, 16 * 300, 16)]
        layers = record_routing(job.model, pieces)
        flow = Flow(pack(pieces), job.model.precision_policy, training=False)
        with torch.no_grad():
            job.model(flow)
    assert [layer.name for layer in layers] == ["0", "1"]
    for layer in layers:
        decision = flow.decisions[f"layers.{layer.name}"]
        assert layer.ids_TK.shape == (4800, 2)
        assert np.array_equal(layer.ids_TK, decision.experts_TK.numpy())
        assert np.allclose(layer.weights_TK.sum(1), 1, atol=1e-5)
    assert not any(m.router._forward_hooks for _, m in job.model.moe_layers())


def test_dropped_choices_are_told_as_such(tmp_path: Path) -> None:
    """With half the room that is needed, about half of the choices are nobody's."""
    model = {"capacity": {"factor": 0.5}}
    with job_of(tmp_path, model=model) as job:
        (layer, *_) = record_routing(job.model, [list(range(1, 65))])
    share = float((layer.ids_TK < 0).mean())
    assert 0.45 <= share < 0.9
    assert abs(layer.load_E.sum() - 1) < 1e-9


def test_the_document_is_long_enough_where_there_is_one(tmp_path: Path) -> None:
    """The first of the asked length; the longest where all are shorter; others fill up."""
    with job_of(tmp_path) as job:
        corpus = job.loader.prepared.valid[0].corpus
    lengths = [len(corpus.document(i)) for i in range(corpus.n_documents)]
    number, documents = choose_documents(corpus, 10_000, 60)
    assert number == int(np.argmax(lengths)) and len(documents[0]) == max(lengths)
    number, documents = choose_documents(corpus, min(lengths), sum(lengths))
    assert number == 0 and sum(map(len, documents)) == sum(lengths)
