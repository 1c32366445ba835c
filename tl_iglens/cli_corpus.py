"""``iglens corpus`` and ``iglens summary``: a file of prompts to a Parquet dataset, and what is in one."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from . import corpus
from ._checks import check_choice, check_positive
from ._console import stdout_console
from ._types import BASELINES, ONSET_RULES
from .corpus.worker import ANALYSES, TOO_LONG
from .tokens import token_label

_MOST_SEGMENTS = 12


def commands(load_model: Callable[[str | None], Any]) -> dict[str, typer.Typer]:
    """The two commands by name; ``load_model`` gives a model by its name, the embedded one for None."""
    run, read = (typer.Typer(add_completion=False, pretty_exceptions_enable=False) for _ in range(2))

    @run.command(epilog="Run it again after an interruption: finished shards are skipped.")
    def corpus_(
        source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A .jsonl, .csv or .parquet file.")],
        out: Annotated[Path, typer.Option(help="Folder of the dataset; new, or of the same run to continue it.")],
        column: Annotated[str, typer.Option(help="Column or field with the text.")] = "text",
        id_column: Annotated[str | None, typer.Option(help="Column that names a prompt.", show_default=False)] = None,
        target_column: Annotated[
            str | None, typer.Option(help="Column with the token to explain.", show_default="the model's top token")
        ] = None,
        target: Annotated[
            str | None, typer.Option(help="One token for all, or next.", show_default="the model's top token")
        ] = None,
        analysis: Annotated[str, typer.Option(help=f"{', '.join(ANALYSES)}.")] = "ig_lens",
        model: Annotated[
            str | None,
            typer.Option(help="Hugging Face name or local folder.", show_default="embedded SmolLM2-135M-Instruct"),
        ] = None,
        every: Annotated[bool, typer.Option("--every", help="Every token of a prompt, not only the last.")] = False,
        mid: Annotated[bool, typer.Option("--mid", help="Split blocks into attention and MLP.")] = False,
        baseline: Annotated[
            str | None, typer.Option(help=f"Start of the path: {', '.join(BASELINES)}.", show_default="embed")
        ] = None,
        bos: Annotated[
            bool | None,
            typer.Option(
                "--bos/--no-bos",
                help="Put the BOS token before every prompt.",
                show_default="as TransformerLens does; --no-bos for the embedded model",
            ),
        ] = None,
        max_tokens: Annotated[int | None, typer.Option(help="Longest prompt.", show_default="the context")] = None,
        too_long: Annotated[str, typer.Option(help=f"What becomes of longer ones: {', '.join(TOO_LONG)}.")] = "skip",
        shard_size: Annotated[int, typer.Option(help="Prompts per partition.")] = 256,
        batch_tokens: Annotated[int, typer.Option(help="Memory budget: tokens analysed together.")] = 4096,
        engine: Annotated[str, typer.Option(help="local, or ray for many machines.")] = "local",
        num_actors: Annotated[int, typer.Option(help="Workers of the ray engine.")] = 1,
        num_gpus_per_actor: Annotated[float, typer.Option(help="GPUs of each of them.")] = 0,
    ) -> None:
        """Analyse every prompt of a file; one row per analysed token in a Parquet dataset."""
        given = {"targets": target, "baseline": baseline, "incl_mid": mid or None, "pos_slice": None if every else -1}
        options = {name: value for name, value in given.items() if value is not None or (every and name == "pos_slice")}
        if bos is None and model is None:
            bos = False  # the embedded model knows its BOS as the start of a chat turn only
        found = corpus.run(
            partial(load_model, model),
            source,
            analysis,
            out,
            column=column,
            id_column=id_column,
            target_column=target_column,
            prepend_bos=bos,
            max_tokens=max_tokens,
            too_long=too_long,
            shard_size=shard_size,
            batch_tokens=batch_tokens,
            engine=engine,
            num_actors=num_actors,
            num_gpus_per_actor=num_gpus_per_actor,
            progress=sys.stderr.isatty(),
            **options,
        )
        _show(found, "mass", 5)

    @read.command()
    def summary(
        out: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that iglens corpus or corpus.run wrote.")],
        onset: Annotated[str, typer.Option(help=f"Rule of the onset: {', '.join(ONSET_RULES)}.")] = "mass",
        top: Annotated[int, typer.Option(help="Prompts with the largest cancellation to show.")] = 5,
    ) -> None:
        """What is in a dataset: counts, errors, gaps, onsets, and the prompts to look at."""
        check_choice("onset", onset, ONSET_RULES)
        check_positive("top", top)
        _show(corpus.load(out), onset, top)

    return {"corpus": run, "summary": read}


def _show(found: corpus.Corpus, rule: str, n: int) -> None:
    """Print the summary of a dataset as a few tables."""
    console = stdout_console()
    console.print(Text(f"{found.path}: {found.provenance['analysis']} · {found.caption()}"), end="\n\n")
    facts = _table("what", "figure")
    for name, value in found.summary().items():
        if name == "errors":
            value = ", ".join(f"{count} {kind}" for kind, count in value.items()) or 0
        elif isinstance(value, bool):
            value = "yes" if value else "no, run it again to continue"
        facts.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
    console.print(facts)
    if "credits" in found.dataset.schema.names:
        console.print("", _onsets(found, rule), "", sep="\n")
        console.print(_largest(found, n))


def _onsets(found: corpus.Corpus, rule: str) -> Table:
    """The segments most tokens are decided in, in their order, and the rest in one row."""
    frame = found.onset_histogram(rule)
    kept = sorted(frame["count"].nlargest(_MOST_SEGMENTS).index)
    table = _table(f"onset ({rule})", "tokens", "share")
    for _, row in frame.loc[[i for i in kept if frame.loc[i, "count"]]].iterrows():
        table.add_row(row["segment"], f"{row['count']:,}", f"{row['share']:.1%}")
    if rest := int(frame["count"].sum() - frame.loc[kept, "count"].sum()):
        table.add_row("other", f"{rest:,}", f"{rest / frame['count'].sum():.1%}")
    return table


def _largest(found: corpus.Corpus, n: int) -> Table:
    """The tokens whose credits undo each other most."""
    table = _table("cancellation", "delta", "prompt", "target")
    for _, row in found.top("cancellation", n).iterrows():
        shown = token_label(row["context"])
        table.add_row(
            f"{row['cancellation']:.2f}",
            f"{row['delta']:+.4f}",
            Text(f"{row['prompt_id']}: {shown[-50:]}"),
            Text(token_label(row["target"])),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table
