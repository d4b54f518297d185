"""lm-evaluation-harness: log-likelihoods over HTTP beside those of `iec eval`."""

import json
import os
import pathlib
import subprocess
import sys

from server import check

LARGEST_DIFFERENCE = 1e-3
QUESTIONS = [
    ("Once upon a time there was a little", [" girl", " boy", " dog", " stone", " king of the sea"]),
    ("Lily and Tom went to the", [" park", " beach to play", " shop", " moon"]),
    ("The cat was sad because it", [" lost its ball", " could not fly", " was happy"]),
    ("One day, a big dog saw a", [" bird", " small cat in the tree", " red car"]),
    ('"Can I play with you?" asked', [" Lily", " the bird.", " Tom and his mom"]),
    ('Mom said, "It is time for', [" bed", " lunch, dear", " school"]),
    ("They liked to play with their", [" toys", " friends", " ball all day"]),
    ("The sun was hot and the sky was", [" blue", " green", " full of birds"]),
]
TASK = """
task: stories
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
GENERATE = """
task: continue
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def lm_eval(context):
    home = context.work / "lm-eval"
    home.mkdir(exist_ok=True)
    data = home / "questions.jsonl"
    # Several copies of each question with other beginnings make requests of different lengths.
    rows = [
        {"query": beginning + query, "choices": choices, "label": 0}
        for beginning in ("", "Sam was here. ", "Once there was a big house near the sea. It was old. ")
        for query, choices in QUESTIONS
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "stories.yaml").write_text(TASK.format(data=data))
    (home / "continue.yaml").write_text(GENERATE.format(data=data))
    pack = context.story()
    server = context.serve("--model", f"story={pack}")
    arguments = f"model=story,base_url={server.url}/v1/completions,max_length=2048"
    arguments += ",tokenizer_backend=remote,num_concurrent=4"
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--tasks",
        "stories,continue",
        "--include_path",
        home,
        "--batch_size",
        "8",
        "--output_path",
        home / "results",
        "--log_samples",
    ]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=600)
    check(done.returncode == 0, f"lm_eval failed: {done.stderr[-2000:]}")
    found = [
        (request["arg_0"], request["arg_1"], *response[0])
        for sample in samples(home, "stories")
        for request, response in zip(sample["arguments"].values(), sample["resps"], strict=True)
    ]
    expected = own(context, pack, found)
    pairs = list(zip(expected, found, strict=True))
    differences = [abs(float(mine["logprob"]) - float(theirs[2])) for mine, theirs in pairs]
    worst = max(differences)
    check(len(found) == sum(len(row["choices"]) for row in rows), f"{len(found)} log-likelihoods")
    check(worst <= LARGEST_DIFFERENCE, f"log-likelihoods differ by {worst:.2e} from those of iec eval")
    greedy = sum(mine["is_greedy"] != (str(theirs[3]) == "True") for mine, theirs in pairs)
    check(greedy == 0, f"{greedy} continuations are greedy in one of both only")
    generated = texts(server, home)
    mean = sum(differences) / len(differences)
    return (
        f"lm-eval, {len(found)} log-likelihoods differ from those of iec eval by at most {worst:.1e} nat "
        f"(mean {mean:.1e}); {generated} texts are those of the server"
    )


def samples(home, task):
    """Returns the logged samples of a task in the order of its questions."""
    files = sorted(pathlib.Path(home / "results").rglob(f"samples_{task}_*.jsonl"), key=os.path.getmtime)
    check(files, f"lm_eval logged no samples of {task}")
    rows = [json.loads(line) for line in files[-1].read_text().splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])


def own(context, pack, found):
    """Returns the log-likelihoods of `iec eval`. Remote tokenizers put no BOS before a context."""
    path = context.work / "lm-eval/requests.jsonl"
    path.write_text("".join(json.dumps({"context": row[0], "continuation": row[1]}) + "\n" for row in found))
    lines = context.iec("eval", pack, "--loglikelihood", path, "--no-bos").splitlines()
    return [json.loads(line) for line in lines]


def texts(server, home):
    """Compares generated texts with single requests; returns their number."""
    rows = samples(home, "continue")
    for row in rows:
        ids = server.ask("/tokenize", {"prompt": row["arguments"]["gen_args_0"]["arg_0"], "add_special_tokens": False})
        alone = server.complete(ids["tokens"], max_tokens=24, stop=["."])
        theirs = row["resps"][0][0]
        check(alone.startswith(theirs) or theirs.startswith(alone), f"found {theirs!r}, expected {alone!r}")
    return len(rows)
