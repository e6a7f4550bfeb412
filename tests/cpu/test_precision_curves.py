"""Held-out loss and experts' gradients in few bits beside fp32's, as the bench makes them."""

from pathlib import Path

import pytest

from bench.precision_curves import CURVES, curves, passed


@pytest.mark.matrix
def test_curves_in_few_bits_lie_beside_fp32s(tmp_path: Path) -> None:
    found = curves([name for name in CURVES if name != "fp32"], tmp_path)
    assert all(passed(found).values()), found
