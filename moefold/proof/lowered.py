"""Holds the numbers that production uses against fp64: one step in fp32 or bf16, fast forms forced.

A rounding may change which experts a token takes, and then everything. So tokens go to all experts
here, nothing is dropped, and values are of a size that magnifies little.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from moefold.layers.config import Precision
from moefold.layers.precision import DTYPES
from moefold.model.config import Block, Decoder, Stack
from moefold.proof.case import Case
from moefold.proof.pool import run_cases
from moefold.proof.verify import Proof, Told, verdict
from moefold.spec.layer import Shape, activation_width, described

IN_A_BLOCK, AT_THE_END = 13, 3
"""Operations one after another: norm, projection, rotation, scores, softmax, values, projection,
sum, norm, projection, gate, projection, sum; and norm, head, loss."""
EXACT = {"replicas": 0.0, "counts": 0.0}
ALIGNMENT = 16
"""Bytes that divide a row which the grouped product takes."""


def lowered(cases: Sequence[Case], precision: Precision, told: Told | None = None) -> Proof:
    """Run one step of cases in a narrow format against one rank in fp64.

    An error may be ``4 * 1.03^depth * eps`` of the format, *depth* being the operations that a
    gradient has behind it, forward and backward.
    """
    made = [narrowed(case, precision) for case in cases]

    def bound(case: Case) -> float:
        operations = IN_A_BLOCK * len(case.subject.decoder.blocks) + AT_THE_END
        return 4 * 1.03 ** (2 * operations) * torch.finfo(DTYPES[precision]).eps

    def tell(number: int, outcome: object) -> None:
        if told is not None:
            told(verdict(made[number], outcome, bound(made[number]), EXACT))  # type: ignore[arg-type]

    outcomes = run_cases(made, told=tell)
    pairs = zip(made, outcomes, strict=True)
    return Proof(tuple(verdict(case, found, bound(case), EXACT) for case, found in pairs))


def narrowed(case: Case, precision: Precision) -> Case:
    """Return a case in a narrow format: the grouped product forced where it takes the widths."""
    decoder, etp = steady(case.subject.decoder), case.layout.split.etp
    subject = replace(case.subject, decoder=decoder, idle=())
    bytes_each = DTYPES[precision].itemsize
    shape = Shape(decoder.hidden, rows=1, etp=etp)
    experts = [spec for b in decoder.blocks if (spec := described(b.ffn)).routing is not None]
    rows = [int(activation_width(spec, shape)) * bytes_each for spec in experts]
    rows.append(decoder.hidden * bytes_each)
    fits = all(row % ALIGNMENT == 0 for row in rows)
    layout = case.layout.model_copy(update={"experts": "grouped"}) if fits else case.layout
    return replace(case, subject=subject, layout=layout, precision=precision)


def steady(decoder: Decoder) -> Decoder:
    """Return a decoder none of whose choices hangs on a rounding."""
    stacks = tuple(
        Stack(repeat=s.repeat, blocks=tuple(_to_all(block) for block in s.blocks))
        for s in decoder.stacks
    )
    return decoder.model_copy(update={"stacks": stacks, "init_std": 0.1})


def _to_all(block: Block) -> Block:
    return Block(attention=described(block.attention).steady(), ffn=described(block.ffn).steady())
