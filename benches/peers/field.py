"""What is installed in the caller's folder, and how each contestant is started there."""

import json
import math
import subprocess
import sys
from pathlib import Path

import install
from contest import Command, Worker

HERE = Path(__file__).parent


def say(*words):
    """To the terminal; standard output is for the tables."""
    print(*words, file=sys.stderr, flush=True)


def last_line(text):
    """The answer of a command, which may print other things before."""
    return json.loads(text.strip().splitlines()[-1])


def flags(request):
    return [word for key, value in request.items() for word in (f"--{key}", value)]


class Field:
    """The folder `setup` and `models` filled."""

    def __init__(self, args):
        self.args, self.root = args, Path(args.folder).resolve()
        self.log = open(self.root / "log.txt", "w", encoding="utf-8")
        self.preload = install.preload(self.root)

    def has(self, peer):
        """Whether `peer` was asked for and is installed; says so if it is not."""
        if peer not in self.args.peers:
            return False
        path = {"vllm": self.python("vllm"), "llamacpp": self.llamacpp()}.get(peer, self.python("torch"))
        if not path.exists():
            say(f"{peer} is skipped: there is no {path}")
        return path.exists()

    def model(self, name):
        return self.root / "models" / name

    def python(self, venv):
        return self.root / venv / "bin/python"

    def llamacpp(self):
        return self.root / "llama/build/bin/llama-batched-bench"

    def gguf(self, model, dtype):
        """The model as llama.cpp reads it, written if it is not there."""
        path = self.root / "gguf" / f"{model}-{dtype}.gguf"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            argv = [self.python("torch"), HERE / "to_gguf.py", "--model", self.model(model), "--dtype", dtype]
            subprocess.run([*argv, "--out", path], stdout=self.log, stderr=self.log, check=True)
        return path

    def worker(self, name, venv, script, model, *options):
        """A script of ours that waits for requests inside the virtual environment `venv`."""
        argv = [self.python(venv), "-B", HERE / script, "--model", self.model(model), "--threads", self.args.threads]
        return Worker(name, [*argv, *options], self.log, self.preload)

    def trl(self, model, dtype, preload):
        """Preloaded it is faster, and takes more memory."""
        argv = [self.python("torch"), "-B", HERE / "trl_step.py", "--model", self.model(model), "--dtype", dtype]
        libraries = self.preload if preload else ()
        name = "trl, preloaded" if preload else "trl"
        return Command(name, lambda request: [*argv, *flags(request)], last_line, self.log, libraries)

    def r3(self, bench, model, *options):
        """`r3 bench`, which has a flag for every key of a request."""
        argv = [self.args.r3, "bench", bench, "--model", self.model(model), "--json", *options]
        return Command("r3", lambda request: [*argv, *flags(request)], last_line, self.log)

    def llama_bench(self, model, dtype):
        """llama.cpp's own bench. It samples nothing, and what is taken is its decoding without the prefill."""
        gguf = self.gguf(model, dtype)

        def argv(request):
            batch, prompt, new = request["batch"], request["prompt"], request["new"]
            context = batch * 256 * math.ceil((prompt + new) / 256)  # it rounds each sequence's down to 256
            # It may end before its last line is printed, so a sequence by itself follows, whose line nobody reads.
            sizes = ["-npp", prompt, "-ntg", new, "-npl", f"{batch},1", "-c", context]
            threads = ["-t", self.args.threads, "-tb", self.args.threads]
            return [self.llamacpp(), "-m", gguf, *sizes, *threads, "--output-format", "jsonl"]

        def read(text):
            figures = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            return {"tokens_per_second": figures[0]["speed_tg"]}

        return Command("llamacpp", argv, read, self.log)
