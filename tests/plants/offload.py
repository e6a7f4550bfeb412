"""Plants of state that lies elsewhere."""

from tests.plants.plant import Plant

CPU = "tests/cpu/test_offload.py::"

PLANTS = (
    Plant(
        "state is left stale on the host after a load",
        "tests/gloo/test_parallel_data_offload.py::"
        "test_state_elsewhere_is_saved_resumed_and_updated_to_the_same_bits",
        "parallel/data/sharding.py",
        "if self._stale or not bucket.has_compute_copy:",
        "if not bucket.has_compute_copy:",
    ),
    Plant(
        "the step counter of offloaded state is not saved",
        CPU + "test_a_disk_that_fails_in_mid_run_is_named_and_the_run_goes_on_elsewhere",
        "parallel/data/offload.py",
        "for name, tensor in part.optimizer.state().items()",
        "for name, tensor in part.optimizer.state().items() if tensor.dim()",
    ),
    Plant(
        "a slot is freed twice",
        CPU + "test_a_slot_that_is_given_back_is_used_again_and_not_given_back_twice",
        "offload/disk.py",
        "            if slot.capacity < 0:\n",
        "            if slot.capacity < -1:\n",
    ),
    Plant(
        "a part is updated before its copies ended",
        CPU + "test_copies_that_take_long_end_before_their_memory_is_used_again",
        "parallel/data/offload.py",
        "            wait_fetched()\n            part.optimizer.step(scale, lr_factor)\n",
        "            part.optimizer.step(scale, lr_factor)\n            wait_fetched()\n",
    ),
    Plant(
        "what was changed in memory does not go back to disk",
        CPU + "test_a_slot_gives_back_what_was_put_there_and_what_was_changed_there",
        "offload/slots.py",
        "self._file.write(self._slot, self._buffer.numpy().data)\n",
        "_ = self._buffer\n",
    ),
    Plant(
        "bytes that changed on disk are taken for what was written",
        CPU + "test_what_is_not_as_it_was_written_is_named_with_rank_and_bytes",
        "offload/disk.py",
        "if slot.digest != crc32(into[: slot.size]):",
        "if slot.digest is None:",
    ),
    Plant(
        "the optimizer's state stays on the device between phases",
        "tests/cpu/test_training_moved.py::test_a_run_that_is_moved_out_and_back_is_the_run_itself",
        "parallel/data/sharding.py",
        "        tensors += [] if optimizer is None else optimizer.tensors()\n",
        "",
    ),
    Plant(
        "compute copies stay on the device between phases",
        "tests/cpu/test_training_moved.py::test_a_run_that_is_moved_out_and_back_is_the_run_itself",
        "parallel/data/sharding.py",
        "        model.precision_policy.free_copies()\n",
        "",
    ),
    Plant(
        "host memory of a run that came back is not freed",
        "tests/cpu/test_training_moved.py::test_a_run_that_is_moved_out_and_back_is_the_run_itself",
        "offload/slots.py",
        "            synchronize(tensor)\n            slot.free()\n",
        "            synchronize(tensor)\n",
    ),
)
