"""Bad inputs, over a hundred: what is typed, what lies in the folder, and what must be said of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

File = str | bytes | Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    command: str
    """`cusearch ...`, or `process NAME ...`. $NAME stands for what the test has running."""
    says: str
    """Regular expression of the line: the thing, the value, the remedy."""
    toml: str = ""
    """Of mine.toml, after its [run] name."""
    files: Mapping[str, File] = field(default_factory=dict)
    status: int = 1
    is_report: bool = False
    """What is said stands in the command's own table."""


def rows_of(*rows: dict[str, object]) -> Callable[[Path], object]:
    return lambda path: parquet.write_table(pa.Table.from_pylist(list(rows)), path)


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


def model(context: int = 4096) -> dict[str, File]:
    """A model's folder `model` without a tokenizer."""
    return {"model/config.json": json.dumps({"model_type": "qwen2", **SMALL, "max_position_embeddings": context})}


def huge_model() -> dict[str, File]:
    """A model's folder `model`, which no machine can train."""
    sizes = {"hidden_size": 16384, "intermediate_size": 65536, "num_attention_heads": 64, "num_hidden_layers": 64}
    return {"model/config.json": json.dumps({"model_type": "qwen2", **sizes})}


def seeing_model(kind: str) -> dict[str, File]:
    """A folder `model` of a model that takes images too, with context enough."""
    text = {**SMALL, "max_position_embeddings": 32768}
    return {"model/config.json": json.dumps({"model_type": kind, "text_config": text})}


Q = {"question": "who", "golden_answers": ["me"]}
SEARCHED = {
    **{"question": "What is the currency of Belarus?", "golden_answers": ["Ruble"]},
    "turns": ["<search>currency of Belarus</search>", "<answer>Ruble</answer>"],
    "documents": [['"Belarus"\nThe currency of Belarus is Ruble.']],
}
TINY = "[environment.search]\ntemplate = 'atlas'\n[episode]\nmax_prompt_tokens = 96\n"
TINY += "max_turn_tokens = 80\nmax_observation_tokens = 88\n"
STUDY = """
[study]
name = "s"
configs = ["atlas"]
baseline = { 'method.name' = 'grpo_full' }
[[part]]
name = "p"
seeds = 1
[part.grid]
'method.name' = ["grpo_full", "sdga_phase"]
[settings]
"eval.every" = 2
"eval.in_order" = true
"run.steps" = 4
"""
LR = r"did you mean learner\.lr\?"
SIMULATE = "cusearch simulate atlas"
CHECK = "cusearch check mine.toml"
EVAL = "cusearch eval atlas --run.wait_s 0.3 --retriever.timeout_s 0.2"
RETRIEVER = "cusearch worker retriever mine.toml"

CASES = [
    # --- the file
    Case("no such config", "cusearch check nope.toml", r"nope\.toml does not exist; give a TOML file, or the name"),
    Case("a folder for a config", "cusearch check there", r"there is a folder; give a .toml", files={"there/x": ""}),
    Case("YAML", "cusearch check a.toml", r"a\.toml is not valid TOML: .*line 1", files={"a.toml": "run: mine\n"}),
    Case("JSON", "cusearch check a.toml", r"a\.toml is not valid TOML: .*line 1", files={"a.toml": '{"run": {}}'}),
    Case("a setting without a config", "cusearch check --learner.lr 1", r"lr is a setting of a config, and none is n"),
    Case("half a TOML file", "cusearch check a.toml", r"a\.toml is not valid TOML", files={"a.toml": "[run\n"}),
    Case("a key twice", CHECK, r"mine\.toml is not valid TOML: .*overwrite", "[pool]\nrollouts = 1\nrollouts = 2"),
    Case("UTF-16", "cusearch check a.toml", r"a\.toml cannot be read: .*utf-8", files={"a.toml": b"\xff\xfe["}),
    Case("an empty config", "cusearch check a.toml", r"run: is missing; .*\[run\] name = ", files={"a.toml": ""}),
    Case("no name", "cusearch check a.toml", r"run\.name: is missing; .*name =", files={"a.toml": "[run]\nsteps = 1"}),
    Case("typographic quotes", "cusearch check a.toml", r"line 2, .*; “ is a typographic quote; write \"",
         files={"a.toml": "[run]\nname = “mine”\n"}),
    Case("True", CHECK, r"is not valid TOML: .*; for True write true", "[learner]\npacking = True"),
    Case("text without quotes", "cusearch check a.toml", r'; text needs quotes: "mine"',
         files={"a.toml": "[run]\nname = mine\n"}),
    Case("a section twice", CHECK, r"Cannot declare \('run',\) twice", "[run]\nsteps = 1"),
    Case("a study for a config", "cusearch launch s.toml", r"s\.toml is a study, .*`cusearch study s\.toml`",
         files={"s.toml": "[study]\nname = 's'\n[[part]]\nname = 'p'\n"}),
    Case("a config for a study", "cusearch study mine.toml", r"is the config of a run, not a study; .*cusearch launch"),
    Case("[[parts]]", "cusearch study s.toml", r"parts: unknown key; did you mean \[\[part\]\]\?$",
         files={"s.toml": STUDY.replace("part", "parts")}),
    Case("no seeds", "cusearch study s.toml", r"part 'p': seeds: .* equal to 1, got 0$",
         files={"s.toml": STUDY.replace("= 1", "= 0")}),
    Case("a grid of none", "cusearch study s.toml", r"methd: unknown key; did you mean method\?$",
         files={"s.toml": STUDY.replace("[part.grid]\n'method", "[part.grid]\n'methd")}),
    Case("no baseline", "cusearch study s.toml", r"study: baseline: is missing; .*compared with, like",
         files={"s.toml": STUDY.replace("baseline = { 'method.name' = 'grpo_full' }\n", "")}),
    Case("a setting for a study", "cusearch study s.toml --learner.lr 1", r"lr is a setting .*`study` reads none",
         files={"s.toml": STUDY}, status=2),
    Case("a study of no run", "cusearch study s.toml --max-runs -1", r"max-runs: must be a whole .*least 1", status=2),
    Case("nothing to learn from", "cusearch warmstart atlas", r"give --demonstrations FILE or --from RUN_FOLDER$"),
    Case("no demonstrations", "cusearch warmstart atlas --demonstrations a.jsonl",
         r"cannot read a\.jsonl: .*no such file"),
    Case("no run", "cusearch warmstart atlas --from runs/x", r"runs/x is not the folder of a run"),
    Case("a rate of 0", "cusearch warmstart atlas --lr 0", r"--lr: must be a positive number, got '0'", status=2),
    Case("all held out", "cusearch warmstart atlas --held-out 1", r"must be a number between 0 and 1, got '1'",
         status=2),
    Case("a model larger than the memory",
         "cusearch warmstart atlas --model.path model --demonstrations a.jsonl",
         r"training 'model' needs \d{4}\.\d GiB of memory, this machine has [\d.]+; use an adapter",
         files=huge_model()),
    Case("an output of another", "cusearch warmstart atlas --demonstrations a.jsonl --output out",
         r"--output out belongs to run 'other', not to 'atlas'; choose another",
         files={"a.jsonl": lines(SEARCHED), "out/run.json": '{"run": "other", "id": "x", "created": "y"}'}),
    Case("a wheel for a model", "cusearch data model a.whl m", r"a\.whl is no GGUF file: it begins with b'PK",
         files={"a.whl": "PK\x03\x04"}),
    Case("demonstrations of nothing", "cusearch warmstart atlas --demonstrations a.jsonl",
         r"none of 1 demonstrations can be used: a\.jsonl, line 1: 'turns' must be a list of texts, got None",
         files={"a.jsonl": '{"question": "Why?", "golden_answers": ["So"]}\n'}),
    Case("Atlas", "cusearch check Atlas", r"Atlas does not exist; did you mean atlas\?"),
    Case("atlas.tml", "cusearch check atlas.tml", r"atlas\.tml does not exist; did you mean atlas\?"),
    Case("sdga-phase", "cusearch check paper/methods/sdga-phase", r"did you mean paper/methods/sdga_phase\?"),
    Case("mine.tml", "cusearch check mine.tml", r"mine\.tml does not exist; did you mean mine\.toml\?"),
    # --- keys
    Case("lr above the sections", CHECK, rf"lr: unknown key; {LR}", "lr = 1e-6"),
    Case("run.step", f"{CHECK} --run.step 3", r"run\.step: unknown key; did you mean run\.steps\?"),
    Case("phase_reserv", f"{CHECK} --method.phase_reserv 1", r"unknown key; did you mean method\.phase_reserve\?"),
    Case("an environment without a label", CHECK, r"name = 'search' belongs to .*write \[environment\.search\] above",
         "[environment]\nname = 'search'"),
    Case("a value for a section", f"{CHECK} --learner 3", r"'--learner' is not an option; write settings", status=2),
    Case("a section for a value", f"{CHECK} --run.name.first x", r"--run\.name\.first: name is a value, not a section"),
    # --- values
    Case("-8 questions", CHECK, r"pool\.questions: .*greater than or equal to 1, got -8", "[pool]\nquestions = -8"),
    Case("2.5 steps", f"{CHECK} --steps 2.5", r"run\.steps: .*integer.*got 2\.5"),
    Case("a range of cores", CHECK, r"learner\.cores: must be .*integers.*got '0-3'", "[learner]\ncores = '0-3'"),
    Case("a word for an integer", CHECK, r"retriever\.topk: .*integer.*got 'three'", "[retriever]\ntopk = 'three'"),
    Case("a word for a boolean", CHECK, r"packing: .*boolean.*got 'maybe'", "[learner]\npacking = 'maybe'"),
    Case("bf16", CHECK, r"model\.dtype: .*'float32' or 'bfloat16', got 'bf16'", "[model]\ndtype = 'bf16'"),
    Case("an unknown dtype", CHECK, r"model\.dtype: .*'float32' or .*got 'int4'", "[model]\ndtype = 'int4'"),
    Case("an unknown template", CHECK, r"'x' is not a template \(paper", "[environment.search]\ntemplate = 'x'"),
    Case("an environment that is none", CHECK, r"'x' is unknown; use one of search", "[environment.e]\nname = 'x'"),
    Case("a setting of init", "cusearch init a.toml --run.steps 3", r"--run\.steps is a setting of a config", status=2),
    Case("a command in one word", f"{CHECK} --alarms.command 'notify-send {{text}}'", r"is no program; separate"),
    Case("an agent's, too", f"{CHECK} --environment.search.command 'python a/b.py'", r"is no program; separate"),
    Case("a webhook in one word", f"{CHECK} --alarms.command 'curl http://h/x {{text}}'", r"is no program; separate"),
    Case("a query of a service", f"{CHECK} --retriever.url 'http://h:1/retrieve?a=1'", r"must end with its path, like"),
    Case("an empty folder", f"{CHECK} --run.folder ''", r"run\.folder: must name a folder or a file, got ''"),
    Case("no home of a data file", "cusearch data check '~nobody-here/x.jsonl'", r"there is no such user; write the"),
    Case("GPUs of a retriever", "cusearch worker retriever atlas --gpu 0", r"the retriever takes no --gpu; learner"),
    Case("changes that a worker accepts", "cusearch worker rollout atlas --accept-changes", r"only the learner takes"),
    Case("a program without its environment", CHECK, r"'mine:answer' is for name = .agent., got name = .search.",
         "[environment.search]\nagent = 'mine:answer'"),
    Case("a wrong field", CHECK, r"may use \{rank\}, .*body", "[environment.e]\ndocument_template = '{body}'"),
    Case("an unknown backend", CHECK, r"backend: .*'bm25', .*got 'elastic'", "[retriever]\nbackend = 'elastic'"),
    Case("no data", CHECK, r"data\.source: .*at least 1 item.*got \(?\[?", "[data]\nsource = []"),
    Case("a device that is none", CHECK, r"device: must be 'cpu'.*got 'gpu'", "[retriever.dense]\ndevice = 'gpu'"),
    Case("half a list", f"{CHECK} --eval.suite '[\"nq\"'", r"--eval\.suite '\[\"nq\"' is no whole value .*a,b or as"),
    Case("half a list of GPUs", f"{CHECK} --learner.gpus '0,1]'", r"learner\.gpus: must be a list, like .*got '0,1\]'"),
    Case("a list of words for GPUs", f"{CHECK} --learner.gpus a,b", r"gpus: must be a list of integers.*got 'a,b'"),
    Case("$HOME", f"{CHECK} --run.folder '$$HOME/x'", r"run\.folder: '\$HOME/x' holds \$HOME, which only a shell"),
    Case("${HOME} of a model", f"{CHECK} --model.path '$${{HOME}}/x'", r"path: .* holds \$\{HOME\}, which only a"),
    Case("$HOME of an output", "cusearch data convert atlas --output '$$HOME/x.parquet'",
         r"--output: '\$HOME/x\.parquet' holds \$HOME, which only a shell", status=2),
    Case("nobody's home", f"{CHECK} --data.source '~nobody-here/x.jsonl'", r"source: .*~, but there is no such user"),
    Case("no template's file", CHECK, r"the template file '\./nope\.txt' cannot be read: No such file",
         "[environment.search]\ntemplate = './nope.txt'"),
    Case("a template without its place", CHECK, r"'Who is it\?' is no file, and must contain \{question\}, where",
         "[environment.search]\ntemplate = 'Who is it?'"),
    Case("top 0", CHECK, r"topk: .* equal to 1, got 0", "[retriever]\ntopk = 0"),
    Case("temperature 0", CHECK, r"temperature: .*greater than or equal to 0.01, got 0", "[episode]\ntemperature = 0"),
    Case("seed -1", f"{CHECK} --run.seed -1", r"run\.seed: .* equal to 0, got -1"),
    Case("no module", CHECK, r"module 'nomodule' .* cannot be imported", "[method]\nname = 'nomodule:X'"),
    Case("no such class", CHECK, r"module 'mymod' has no 'Nope'", "[method]\nname = 'mymod:Nope'", {"mymod.py": ""}),
    Case("a syntax error", CHECK, r"imported \(SyntaxError", "[method]\nname = 'mybad:X'", {"mybad.py": "d ("}),
    # --- what must fit together
    Case("K beyond N G", CHECK, r"K = 224\) must be <= .*N G = 192\); lower it", "[method]\nbudget = 224"),
    Case("published too seldom", CHECK, r"max_staleness \(2\) must be >= .*\(3\)", "[learner]\npublish_every = 4"),
    Case("a small buffer", CHECK, r"max_trajectories \(9\) must be >= .*768", "[redis]\nmax_trajectories = 9"),
    Case("fewer GPUs than ranks", CHECK, r"\[0\] must name at least 2", "[learner]\nranks = 2\ngpus = [0]"),
    Case("latencies", CHECK, r"latency_p99_s \(0\.0\) must be >= .*1\.0", "[retriever]\nlatency_median_s = 1.0"),
    Case("an index of atlas", CHECK, r"index must not be set for the corpus 'atlas'", "[retriever]\nindex = 'x'"),
    # --- addresses and names
    Case("a password in the URL", CHECK, r"set CUSEARCH_REDIS_PASSWORD", "[redis]\nurl = 'redis://u:hunter2@h:1/0'"),
    Case("a port out of range", CHECK, r"redis://h:70000' must look like", "[redis]\nurl = 'redis://h:70000'"),
    Case("half a sentinel", CHECK, r"HOST:PORT/SERVICE", "[redis]\nurl = 'redis+sentinel://h:1'"),
    Case("ftp", CHECK, r"'ftp://h' must look like http", "[retriever.zerosearch]\nurl = 'ftp://h'"),
    Case("a name of two words", CHECK + " --run.name 'my run'", r"run\.name: must be letters.*got 'my run'"),
    Case("a name that climbs", CHECK + " --run.name ../../etc", r"run\.name: must be letters.*got '\.\./\.\./etc'"),
    # --- the command line
    Case("no value", f"{CHECK} --learner.lr", r"--learner\.lr needs a value: --learner\.lr VALUE"),
    Case("a flag for a value", f"{CHECK} --learner.lr --steps 3", r"--learner\.lr needs a value"),
    Case("no section", f"{CHECK} --lr 1e-6", r"'--lr' is not an option; .*did you mean --learner\.lr\?", status=2),
    Case("--set", f"{CHECK} --set learner.lr=1", r"write settings .*here --learner\.lr=1", status=2),
    Case("hydra", f"{CHECK} learner.lr=1", r"'learner\.lr=1' is not an option; .*here --learner\.lr=1"),
    Case("an unknown command", "cusearch trian", r"invalid choice: 'trian'; choose from demo, init, launch", status=2),
    Case("no config", "cusearch launch", r"required: config; see cusearch launch --help", status=2),
    Case("JSON of a view", "cusearch buckets atlas --json", r"--json is an option of --once and of --ledger; add one"),
    Case("a quick view", "cusearch buckets atlas --once --quick", r"--quick is an option of --ledger; add it"),
    Case("two views", "cusearch buckets atlas --once --ledger", r"--ledger: not allowed with .*--once", status=2),
    Case("a GPU of no size", f"{CHECK} --gpu-gib big", r"--gpu-gib: must be a size.*like 80, got 'big'", status=2),
    Case("sizeless GPUs", "cusearch init a.toml --gpus 8", r"--gpus: must be how many of how many GB.*'8'", status=2),
    Case("times the wrong way round", f"{SIMULATE} --episode-s 15,6", "must be two numbers.*, got '15,6'", status=2),
    Case("one time of two", f"{SIMULATE} --episode-s 6", "--episode-s: must be two numbers of seconds.*", status=2),
    Case("a chance above 1", f"{SIMULATE} --hang 2,60", ".*a probability and seconds.*got '2,60'", status=2),
    Case("workers that are faster", f"{SIMULATE} --slow 0.5,0.1", ".*a share and a factor.*got '0.5,0.1'", status=2),
    Case("figures to .txt", f"{SIMULATE} --output s.txt", r"--output must be a \.json file, got s\.txt"),
    Case("no workers to simulate", f"{SIMULATE} --workers 0,2", "--workers: must be numbers.*got '0,2'", status=2),
    Case("no process", "cusearch worker trainer mine.toml", r"invalid choice: 'trainer'; choose .*learner", status=2),
    Case("lauch", "cusearch lauch mine.toml", r"invalid choice: 'lauch'; did you mean launch\?", status=2),
    Case("a setting twice", f"{CHECK} --learner.lr 1 --learner.lr=2", r"lr is given 2 times \(1, 2\); give it once",
         status=2),
    Case("steps twice", f"{CHECK} --steps 1 --run.steps 2", r"--run\.steps is given 2 times \(1, 2\)", status=2),
    Case("the suite twice", f"{EVAL} --suite nq --eval.suite nq", r"--suite and --eval\.suite are the same setting"),
    Case("a demo of no step", "cusearch demo --steps 0", r"a demo needs at least 1 step, got run\.steps = 0"),
    Case("a demo of too few held-out", "cusearch demo --eval.questions_per_category 100000",
         r"eval\.questions_per_category must be <= \d+ \(test chains of . links?\), got 100000"),
    Case("a demo of nothing held-out", "cusearch demo atlas mine.toml", r"eval\.suite",
         toml="[data]\nsource = 'q.jsonl'", files={"q.jsonl": lines(Q)}),
    Case("a demo of fewer", "cusearch demo --steps -3", r"run\.steps: .*equal to 0, got -3"),
    Case("depth -1", "cusearch buffer ls atlas --depth -1", r"--depth: must be a whole .*least 0, got '-1'", status=2),
    Case("reward nan", "cusearch buffer ls atlas --min-reward nan", r"reward: must be a number, got 'nan'", status=2),
    Case("limit 0", "cusearch buffer ls atlas --limit 0", r"limit: must be a whole .*least 1, got '0'", status=2),
    Case("trace of a last step", "cusearch trace here --step last", r"--step: invalid int value: 'last'", status=2),
    Case("replay of no run", "cusearch replay here --step 1", r"here.* is not the folder of a run; give one"),
    Case("runs of nothing", "cusearch runs --folder here", r"here holds no run; give the folder that your runs are in"),
    Case("compare one", "cusearch runs compare here", r"needs two runs or more: cusearch runs compare runs/one"),
    Case("compare no runs", "cusearch runs compare here there", r"is not the folder of a run; give one like runs/demo"),
    Case("trace of no run", "cusearch trace here --step 1", r"here.* is not the folder of a run; give one"),
    Case("compare to .xyz", "cusearch runs compare a b --output c.xyz", r"--output .*c\.xyz.* must end in one of"),
    # --- models
    Case("no model", "cusearch launch mine.toml --model.path ./gone", r"model\.path '\./gone' does not exist; give a"),
    Case("no config.json", "cusearch launch mine.toml --model.path x", r"'x' holds no config\.json", files={"x/y": ""}),
    Case("a file for a model", "cusearch launch mine.toml --model.path y", r"'y' is a file; give", files={"y": ""}),
    Case(
        "no tokenizer", "cusearch launch mine.toml --model.path model", r"put tokenizer\.json next to", TINY, model()
    ),
    Case("gone", "cusearch launch atlas --data.source gone.jsonl", r"data\.source: cannot read gone\.jsonl: there is"),
    Case("long turns", "cusearch launch atlas --episode.max_turn_tokens 200", r"1736 .* 1024.*; lower"),
    Case("a short context", "cusearch launch mine.toml --model.path model", r"1016 .* 80; lower", TINY, model(80)),
    Case("a model that sees", "cusearch launch mine.toml --model.path model",
         r"model\.path 'model' is multimodal \(gemma3\); only text models are supported", TINY, seeing_model("gemma3")),
    Case("another that sees", "cusearch launch mine.toml --model.path model",
         r"model\.path 'model' is multimodal \(qwen2_vl\); only text models", TINY, seeing_model("qwen2_vl")),
    Case("a learner of one that sees", "cusearch worker learner mine.toml --model.path model --learner.cores []",
         r"model\.path 'model' is multimodal \(gemma3\); only text models", TINY, seeing_model("gemma3")),
    Case("one that sees, checked", f"{CHECK} --model.path model", r"error tokenizer .*gemma3\); only text models",
         TINY, seeing_model("gemma3"), is_report=True),
    Case(
        "half a config.json",
        "cusearch launch mine.toml --model.path model",
        r"model\.path 'model' has no readable config\.json",
        files={"model/config.json": "{"},
    ),
    Case("no checkpoint", "cusearch eval atlas --checkpoint ./gone --output s.json", r"--checkpoint '\./gone' does"),
    # --- data
    Case("a folder of data", "cusearch data check there", r"there is a folder; give a file in it, one of \.parquet",
         files={"there/x": ""}),
    Case("an empty parquet", "cusearch data check a.parquet", r"0 good rows.*no question can be used",
         files={"a.parquet": lambda path: parquet.write_table(pa.table({"question": pa.array([], pa.string()),
                "golden_answers": pa.array([], pa.list_(pa.string()))}), path)}, is_report=True),
    Case("NaN", "cusearch data check a.jsonl", r"line 2: 'golden_answers' must be .*got nan",
         files={"a.jsonl": lines(Q, Q | {"golden_answers": float("nan")})}, is_report=True),
    Case("true and null", "cusearch data check a.jsonl", r"line 1: .*got True.*line 2: .*got None",
         files={"a.jsonl": lines(Q | {"golden_answers": True}, Q | {"golden_answers": None})}, is_report=True),
    Case("wrong columns", "cusearch data check a.parquet", r"columns? .*prompt.*needs? ",
         files={"a.parquet": rows_of({"prompt_text": "who"})}),
    Case("a CSV file without a header", "cusearch data check a.csv", r"has the columns q; it needs",
         files={"a.csv": "q"}),
    Case("another kind of file", "cusearch data check a.toml", r"is a \.toml file; give one of", files={"a.toml": "q"}),
    Case("convert into CSV", "cusearch data convert atlas --output o.csv",
         r"--output must end in \.parquet or \.jsonl, got o\.csv"),
    Case("Latin-1 questions", "cusearch data check a.jsonl", r"line 1: is not JSON: 'utf-8' codec",
         files={"a.jsonl": '{"question": "où"}'.encode("latin-1")}, is_report=True),
    Case("an id twice", "cusearch data check a.jsonl", r"line 2: the id 'a/1' was used before",
         files={"a.jsonl": lines(Q | {"id": "1"}, Q | {"id": "1"})}, is_report=True),
    Case("no such data", "cusearch data check gone.jsonl", r"gone\.jsonl: there is no such file; give"),
    Case("a broken parquet", f"{CHECK} --data.source a.parquet", r"error data\.source .*cannot read a\.parquet",
         files={"a.parquet": b"PAR1 and no more"}, is_report=True),
    Case("a long question", "cusearch check atlas --data.source a.jsonl", r"error .*max_prompt_tokens \(96\).*raise it",
         files={"a.jsonl": lines(Q | {"question": "who " * 500})}, is_report=True),
    Case("a long question for a worker", "cusearch worker rollout atlas --data.source a.jsonl --rollout.cores []",
         r"1 of 1 questions make .*max_prompt_tokens \(96\): 'a/0' has \d+ tokens.*; raise it to \d+, or remove",
         files={"a.jsonl": lines(Q | {"question": "who " * 500})}),
    Case("a Latin-1 corpus", "cusearch index mine.toml", r"c\.jsonl, line 1: is not JSON: 'utf-8'",
         "[retriever]\ncorpus = 'c.jsonl'\nindex = 'i'", {"c.jsonl": '{"id": 1, "contents": "où"}'.encode("latin-1")}),
    Case("an index of no engine", "cusearch index mine.toml", r"backend 'zerosearch' has no index; bm25 and dense have",
         toml="[retriever]\nbackend = 'zerosearch'\ncorpus = 'c.jsonl'\nindex = 'i'\n", files={"c.jsonl": "damaged"}),
    Case("an empty corpus", "cusearch index mine.toml", r"retriever\.corpus c\.jsonl is empty; it needs lines of",
         "[retriever]\ncorpus = 'c.jsonl'\nindex = 'i'", {"c.jsonl": ""}),
    Case("a file for an index", "cusearch index mine.toml", r"retriever\.index i/manifest\.json cannot be written: Not",
         "[retriever]\ncorpus = 'c.jsonl'\nindex = 'i'", {"c.jsonl": "no JSON", "i": ""}),
    Case("a passage without text", f"{RETRIEVER} --retriever.corpus c.jsonl", r"c\.jsonl, line 2: 'contents' must be",
         files={"c.jsonl": lines({"id": 1, "contents": "x"}, {"id": 2})}),
    Case("no index", f"{RETRIEVER} --retriever.corpus c.jsonl --retriever.index i", r"i holds no .*cusearch index",
         files={"c.jsonl": lines({"id": 1, "contents": "x"})}),
    Case("an index of atlas's own", "cusearch index atlas", r"retriever\.index must name the folder to write"),
    Case("no key", f"{RETRIEVER} --retriever.backend serper", r"'serper' needs a key: set .*SERPER_API_KEY"),
    Case("no suite", f"{EVAL} --suite nqq", r"eval\.suite: 'nqq' is not a benchmark; use nq, "),
    Case("a temperature below 0", f"{EVAL} --temperature -1", r"--temperature: must be 0, or .*got '-1'", status=2),
    Case("a low temperature", f"{EVAL} --temperature 0.001", r"--temperature: .* from 0\.01 to 2", status=2),
    Case("a high temperature", CHECK, r"temperature: .*less than or equal to 2", "[episode]\ntemperature = 2.5"),
    Case("a demo without its judge", "cusearch demo --eval.judge.url $nobody/v1 --eval.judge.model x",
         r"the judge at eval\.judge\.url http.* fails"),
    Case("a temperature of nan", f"{EVAL} --temperature nan", r"--temperature: must be .*got 'nan'", status=2),
    Case("an endless temperature", f"{EVAL} --temperature inf", r"--temperature: must be .*got 'inf'", status=2),
    Case("samples below 0", f"{EVAL} --samples -2", r"--samples: must be a whole .*least 0, got '-2'", status=2),
    Case("too many cities", "cusearch atlas check --per-length 9999", r"--per-length must be <= 500 \(test chains"),
    Case("no cities", "cusearch atlas check atlas --per-length 0", r"--per-length must be >= 1 test chain .*, got 0"),
    Case("probes of what has no evidence", f"{EVAL} --probe --suite a.jsonl", r"--probe needs questions that name",
         files={"a.jsonl": lines(Q)}),
    Case("no judge", f"{EVAL} --eval.judge.url $nobody/v1", r"the judge at eval\.judge\.url http\S+/v1 fails: Conn"),
    Case("a judge of another kind", f"{EVAL} --eval.judge.url $http/html", r"/html must answer .*got '<html>.*; give"),
    Case("--output .txt", f"{EVAL} --output s.txt", r"--output must be a \.json file, got s\.txt"),
    Case("--output in a file", f"{EVAL} --output y/s.json", r"--output y/s\.json cannot be written: ", files={"y": ""}),
    # --- services
    Case("no Redis", "cusearch buckets atlas --ledger --redis.url $dead", r"1:\d+ cannot be .*fix redis\.url"),
    Case("no Redis to watch", "cusearch buckets atlas --redis.url $dead", r"cannot be reached .*`cusearch redis"),
    Case("Redis speaks HTTP", "cusearch buckets atlas --ledger --redis.url $web", r"is not a Redis .*; fix redis\.url"),
    Case("a wrong password", "cusearch buckets atlas --workers --redis.url $locked", r"refuses .*REDIS_PASSWORD"),
    Case("an unknown run", "cusearch buckets atlas --ledger --redis.url $redis --run.name gone", r"'gone'; .*known"),
    Case("no trajectory", "cusearch buffer peek atlas 9:9 --run.name known --redis.url $redis", r"'9:9'; .*buffer ls"),
    Case("no ticket", "cusearch buffer requeue atlas 77 --run.name known --redis.url $redis", r"ticket 77 is not"),
    Case("garbage", f"{EVAL} --retriever.url $http/garbage", r"/garbage has given no valid answer .*retriever\.url"),
    Case("no such place", "cusearch buffer quarantine atlas 9:9 --run.name known --redis.url $redis", r"'9:9' is not"),
    Case("workers of no run", "cusearch buckets atlas --workers --redis.url $redis --run.name no", r"no run 'no'; it"),
    Case("errors", f"{EVAL} --retriever.url $http/500", r"/500 has given no valid .*it answers 500.*retriever\.url"),
    Case("silence", f"{EVAL} --retriever.url $http/silence", r"/silence has given no valid .*Timeout.*retriever\.url"),
    Case("no page", f"{EVAL} --retriever.url $http/404", r"/404 (refuses a search \(404\)|has given no valid.*404)"),
    Case("no retriever", f"{EVAL} --retriever.url $nobody", r"has given no valid answer .*refused|Connect call failed"),
    Case("a taken port", f"{RETRIEVER} --retriever.url $http", r"retriever\.url: cannot listen on port \d+ .*; choose"),
    # --- folders and devices
    Case("a file for the run", "cusearch launch atlas --run.folder y --redis.url $dead", r"run\.folder y .*; choose",
         files={"y": ""}),
    Case("a system folder", "cusearch launch atlas --run.folder /proc/x --redis.url $dead", r"/proc/x .*; choose"),
    Case("export of another kind", "cusearch buffer export atlas --run.name known --redis.url $redis --output a.csv",
         r"--output must be a \.jsonl file, got a\.csv"),
    Case("export into a file", "cusearch buffer export atlas --run.name known --redis.url $redis --output y/o.jsonl",
         r"--output y/o\.jsonl cannot be written: .*; choose another", files={"y": ""}),
    Case("convert into a file", "cusearch data convert atlas --output y/o.parquet",
         r"--output y/o\.parquet cannot be written: .*; choose another", files={"y": ""}),
    Case("a demo elsewhere", "cusearch demo atlas --run.folder site", r"site holds no run\.json, .*choose another with",
         files={"site/config.toml": "title = 'my blog'"}),
    Case("an id alone", "cusearch buffer quarantine 3:1", r"the config is missing: .* quarantine CONFIG 3:1"),
    Case("own transport", "cusearch redis atlas --redis.transport docs.examples.one_process:open_buffer --redis.url x",
         r"redis\.transport is 'docs\.examples\.one_process:open_buffer': this run has no Redis"),
    Case("a used port", "cusearch redis atlas --run.folder new --redis.url $redis", r"listens there already; ch"),
    Case("no run's folder", "cusearch reset atlas --run.folder there --redis.url $redis", r"not the folder of a run",
         files={"there/thesis.txt": "years of work"}),
    Case("no GPU", "cusearch worker rollout atlas --rollout.gpus [97] --rollout.cores []",
         r"rollout\.gpus = \[97\], but CUDA finds 0 of them .*name other GPUs"),
    Case("no GPU to encode", f"{RETRIEVER} --retriever.backend dense --retriever.dense.device cuda:97",
         r"device = 'cuda:97', but CUDA finds \d GPUs .*set it to 'cpu'"),
    Case("nothing to score", "cusearch worker evaluator atlas", r"eval\.every is 0, so .*set it to a number of steps"),
]  # fmt: skip
