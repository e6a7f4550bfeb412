"""The kernels of rotation as code: 16 heads of 128, and latent heads of 128 and 64 dims."""

from moefold.kernels.rope import fused
from tests.triton.compiled import budget_test, meta

T = 8192
TURN = meta(T, 32), meta(T, 32)
LAUNCHES = {
    "heads": lambda: fused.turn.launch(meta(T, 16, 128), meta(T, 64), meta(T, 64), False, False),
    "last dims": lambda: fused.turn.launch(meta(T, 128, 192), *TURN, True, True),
    "latents": lambda: fused.expand.launch(
        meta(T, 128, 256), meta(T, 576)[:, 512:], *TURN, 128, True
    ),
    "their gradients": lambda: fused.expand_backward.launch(
        meta(T, 128, 192), meta(T, 128, 128), *TURN, 128, True
    ),
}
test_code_is_as_recorded = budget_test("rope", LAUNCHES)
