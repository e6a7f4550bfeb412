"""Compare drawn conversations, chat templates and tokenizer folders with transformers.

Each conversation goes through three drawn pairs of template and folder. What is trained must have
the reference's token ids and labels, or the line must be refused for a reason that holds. Texts,
prompts with completions and pairs of texts, a fifteenth as many of each with every folder, must
have the ids and labels of AutoTokenizer with TRL's rules. Prints counts by outcome, and exits with
1 on a difference:

    python bench/chats_differential.py [--seed N] [--count 300] [--save]
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.differential import FOLDERS, MARKED, NAMES, outcomes, tally
from tests.differential_texts import text_outcomes

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Compare and print; ``--save`` writes the counts."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--save", action="store_true", help="write results/chats_differential.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = list(outcomes(args.seed, args.count, Path(folder)))
        texts = list(text_outcomes(args.seed, args.count // 15, Path(folder)))
    wrong = [outcome for outcome in found if outcome.difference]
    for outcome in wrong:
        print(f"\n{outcome.template} with {outcome.folder}: {outcome.difference}")
        print(f"  refused: {outcome.refusal or 'no'}\n  {json.dumps(outcome.drawn.row)}")
    other = [outcome for outcome in texts if outcome.found != outcome.wanted]
    for outcome in other:
        print(f"\n{outcome.kind} with {outcome.folder}: {json.dumps(outcome.row)}")
        print(f"  found: {outcome.found}\n  wanted: {outcome.wanted}")
    counts = tally(found)
    print(f"\n{args.count} conversations, {len(found)} pairs, {len(wrong)} differences")
    for reason, count in counts.items():
        print(f"  {count:4} {reason}")
    print(f"{len(texts)} texts and pairs of texts, {len(other)} differences")
    equal = Counter(outcome.template for outcome in found if not outcome.refusal)
    facts = {
        "transformers": version("transformers"),
        "seed": args.seed,
        "conversations": args.count,
        "templates": len(NAMES),
        "folders": len(FOLDERS),
        "pairs": len(found),
        "pairs_with_masks": sum(o.template.endswith(MARKED) and not o.refusal for o in found),
        "texts": len(texts),
        "differences": len(wrong) + len(other),
        "outcomes": counts,
        "equal_by_template": dict(sorted(equal.items())),
    }
    if args.save:
        text = json.dumps(facts, indent=1)
        (RESULTS / "chats_differential.json").write_text(text + "\n")
    return 1 if wrong or other else 0


if __name__ == "__main__":
    sys.exit(main())
