"""Cross-entropy over the whole logits at once: what the chunked form is compared with."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Return the summed cross-entropy of the rows whose label is not -100."""
    logits_TV = (x_TD @ head_VD.t()).double()
    return F.cross_entropy(logits_TV, labels_T, reduction="sum")
