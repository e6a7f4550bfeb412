"""Planted bugs: context parallelism: what ranks share, see and say."""

from tests.plants.plant import Plant

ATTENTION = "tests/gloo/test_layers_context.py::"
STEPS = "tests/gloo/test_layers_context_steps.py::"
BLOCKS = "tests/cpu/test_kernels_attention_block.py::"

PLANTS = (
    Plant(
        "a router term counts the choices of one context rank",
        STEPS + "test_router_terms_are_those_of_the_whole_micro_batch",
        "moe/balance.py",
        'ranks = flow.world.group("tp_cp")\n',
        'ranks = flow.world.group("tp")\n',
    ),
    Plant(
        "documents are counted from a context rank's first row",
        STEPS + "test_a_term_of_sequences_sees_documents_that_ranks_share",
        "data/batch.py",
        "rows_T = self.full_row_T[: self.n_valid]\n",
        "rows_T = torch.arange(self.n_valid, device=self.ids_T.device)\n",
    ),
    Plant(
        "padding on a context rank is one more document",
        ATTENTION + "test_padding_gives_zeros_and_gets_no_gradient",
        "layers/context/visibility.py",
        "lengths = (len(self._local_rows(span, query_rank)) for span in self._segments)",
        "lengths = [len(self._local_rows(span, query_rank)) for span in self._segments]\n"
        "            lengths.append(self.rows - sum(lengths))",
    ),
    Plant(
        "padding sees the last document",
        ATTENTION + "test_padding_gives_zeros_and_gets_no_gradient",
        "layers/context/visibility.py",
        "return [range(end - length, end) for length, end in lengths_and_ends]",
        "ends = [*self._ends[:-1], self.rows * self.ranks]\n"
        "        starts = [0, *self._ends[:-1]]\n"
        "        return [range(s, e) for s, e in zip(starts, ends, strict=True)]",
    ),
    Plant(
        "gradients begin as the rows times zero",
        BLOCKS + "test_rows_of_no_tile_leak_nothing",
        "kernels/attention/block.py",
        "torch.zeros_like(x, dtype=dtype) for x",
        "x.to(dtype) * 0 for x",
    ),
    Plant(
        "a rank with nothing to send or receive leaves its turn out",
        ATTENTION + "test_all_ranks_of_a_group_do_the_same_in_the_same_order",
        "layers/context/ring.py",
        "        pending = shift(sent_UW, into_UW, distance, self._ranks, self._label)\n",
        "        if not len(sent_UW) + rows:\n"
        "            return _Transfer(Pending(), into_UW)\n"
        "        pending = shift(sent_UW, into_UW, distance, self._ranks, self._label)\n",
    ),
)
