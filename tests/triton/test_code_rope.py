"""The kernels of rotation as code: 16 heads of 128, and latent heads of 128 and 64 dims."""

from moefold.kernels.rope import fused
from tests.triton.compiled import USUAL, budget_test, compiling, meta

T = 8192
TURN = meta(T, 32), meta(T, 32)
LAUNCHES = {
    "heads": lambda: fused.rotate.launch(meta(T, 16, 128), meta(T, 64), meta(T, 64), False, False),
    "last dims": lambda: fused.rotate.launch(meta(T, 128, 192), *TURN, True, True),
    "latents": lambda: fused.expand.launch(
        meta(T, 128, 256), meta(T, 576)[:, 512:], *TURN, 128, True
    ),
    "their gradients": lambda: fused.expand_backward.launch(
        meta(T, 128, 192), meta(T, 128, 128), *TURN, 128, True
    ),
}
test_code_is_as_recorded = budget_test("rope", LAUNCHES)


def test_places_of_heads_have_64_bits() -> None:
    """Heads that lie first have all rows between them: 128 of 192 dims, from 87,382 rows on."""
    with compiling(USUAL) as found:
        LAUNCHES["last dims"]()
    assert "arith.extsi %head_stride : i32 to i64" in found["heads"].asm["ttir"]
