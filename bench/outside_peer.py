"""What other tools make of an exported folder; runs in an environment of theirs, without moefold.

    python bench/outside_peer.py generate FOLDER < JSON    a list of prompts and a number of tokens
    python bench/outside_peer.py evaluate FOLDER < JSON    the path of lines with a field "text"
    python bench/outside_peer.py train FOLDER < JSON       the path of lines with "messages"

Prints one line of JSON: new token ids of each prompt; nats and tokens by lm-eval; losses by TRL.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

TASK = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


def generate(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the ids that ``generate`` adds to each prompt, greedily, called as users do."""
    import torch
    import transformers

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in asked["prompts"]:
        given = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**given, max_new_tokens=asked["tokens"], do_sample=False)
        found.append(ids[0, given["input_ids"].shape[1] :].tolist())
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return {"release": transformers.__version__, "ids": found, "ends": ends}


def evaluate(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return lm-eval's bits per byte of a file's texts, and their bytes."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as tasks:
        Path(tasks, "local_text.yaml").write_text(TASK.format(file=asked["file"]))
        manager = TaskManager(include_path=tasks, include_defaults=False)
        # It writes the start token before each text itself, and would write a second one where a
        # tokenizer adds it, too, and count the second as predicted (0.4.13).
        model = HFLM(
            pretrained=folder, dtype="float32", device="cpu", batch_size=1, add_bos_token=False
        )
        found = lm_eval.simple_evaluate(
            model, tasks=["local_text"], task_manager=manager, bootstrap_iters=0
        )
    bits = found["results"]["local_text"]["bits_per_byte,none"]
    return {"release": lm_eval.__version__, "bits_per_byte": bits}


def train(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of some steps of TRL's trainer on conversations."""
    import trl
    from datasets import load_dataset

    rows = load_dataset("json", data_files=asked["file"], split="train")
    with tempfile.TemporaryDirectory() as out:
        config = trl.SFTConfig(
            output_dir=out,
            max_steps=asked["steps"],
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            bf16=False,
            use_cpu=True,
            save_strategy="no",
        )
        trainer = trl.SFTTrainer(model=folder, args=config, train_dataset=rows)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"release": trl.__version__, "losses": losses}


if __name__ == "__main__":
    what = {"generate": generate, "evaluate": evaluate, "train": train}[sys.argv[1]]
    print(json.dumps(what(sys.argv[2], json.load(sys.stdin))))
