"""Markdown tables of what was measured, as `docs/benchmarks.md` has them, with the ratio of r3 to the best peer."""

NAMES = {"hf": "Hugging Face", "llamacpp": "llama.cpp", "vllm": "vLLM", "torch": "PyTorch", "trl": "TRL", "r3": "r3"}


def number(value):
    """Three digits, and all of those before the point; thousands apart."""
    if value >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def cell(figure, unit=1):
    """`median (least to greatest)`, in units of `unit`."""
    if figure is None:
        return ""
    median, low, high = (number(figure[key] / unit) for key in ("median", "min", "max"))
    return f"{median} ({low} to {high})"


def ratio(ours, theirs):
    return f"**{ours / theirs:.2f}**" if ours and theirs else ""


def lines(head, body):
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def find(rows, what, **match):
    """The figure `what` of the rows that match, or None."""
    for row in rows:
        if all(row[key] == value for key, value in match.items()):
            return row.get(what)
    return None


def best(figures, choose=max):
    """The best median, or None if nobody has one."""
    medians = [figure["median"] for figure in figures if figure]
    return choose(medians) if medians else None


def cases(rows, *keys):
    """The distinct values of `keys`, in order of appearance."""
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))


def decode(rows):
    """Tokens/s a batch."""
    who = [name for name in NAMES if name in {row["who"] for row in rows}]
    body = []
    for model, dtype, batch in cases(rows, "model", "dtype", "batch"):
        here = {"model": model, "dtype": dtype, "batch": batch}
        figures = {name: find(rows, "tokens_per_second", who=name, **here) for name in who}
        ours = best([figures.get("r3")])
        theirs = best([figure for name, figure in figures.items() if name != "r3"])
        body.append([model, dtype, str(batch), *map(cell, figures.values()), ratio(ours, theirs)])
    return lines(["model", "dtype", "batch", *(NAMES[name] for name in who), "r3 / best peer"], body)


def train(rows):
    """Tokens/s of forward, backward and AdamW, and peak memory, of each of PyTorch's modes; ratios to the best of each."""
    modes = [mode for (mode,) in cases(rows, "mode") if mode != "r3"]
    body = []
    for model, dtype, shape in cases(rows, "model", "dtype", "shape"):
        here = {"model": model, "dtype": dtype, "shape": shape}
        speeds = [find(rows, "tokens_per_second", mode=mode, **here) for mode in modes]
        memory = best([find(rows, "peak_memory_bytes", mode=mode, **here) for mode in modes], min)
        ours = find(rows, "tokens_per_second", mode="r3", **here)
        our_memory = best([find(rows, "peak_memory_bytes", mode="r3", **here)])
        megabytes = " / ".join(number(size / 1e6) if size else "?" for size in (our_memory, memory))
        faster = ratio(best([ours]), best(speeds))
        smaller = ratio(our_memory, memory)
        body.append([model, dtype, shape, *map(cell, speeds), cell(ours), faster, megabytes, smaller])
    head = ["model", "dtype", "tokens", *modes, "r3", "r3 / best mode"]
    return lines([*head, "peak MB, r3 / least mode", "ratio"], body)


def step(rows):
    """Seconds of a step, seconds to the first one, peak memory: TRL's least, r3's, and how many times less ours are."""
    body = []
    for model, dtype in cases(rows, "model", "dtype"):
        here = [row for row in rows if (row["model"], row["dtype"]) == (model, dtype)]
        line = [model, dtype]
        for what, unit in (("step_seconds", 1), ("first_step_seconds", 1), ("peak_memory_bytes", 1e6)):
            theirs = least(row.get(what) for row in here if row["who"] != "r3")
            ours = least(row.get(what) for row in here if row["who"] == "r3")
            line += [cell(theirs, unit), cell(ours, unit), ratio(best([theirs]), best([ours]))]
        body.append(line)
    head = ["model", "dtype", "step, s, TRL", "r3", "TRL / r3", "first step after, s, TRL", "r3", "TRL / r3"]
    return lines([*head, "peak MB, TRL", "r3", "TRL / r3"], body)


def least(figures):
    """The figure with the least median, or None if there is none."""
    return min((figure for figure in figures if figure), key=lambda figure: figure["median"], default=None)
