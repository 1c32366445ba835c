"""The command ``iglens``: the table of a prompt's answer, token by token, in a terminal or as JSON."""

import contextlib
import io
import json
import logging
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ._checks import check_choice, check_positive, fail
from ._console import stdout_console
from ._types import BASELINES, ESTIMATORS, ONSET_RULES
from .cli_corpus import commands
from .generation import decode, explain_generation, render_prompt
from .lens import ig_lens
from .report import write_report
from .result import IGLensResult
from .tokens import token_label

_FED_LINES = 3  # of the prompt as fed, and of its ids
_LONGEST_TOKEN = 16
_FEW_ROWS, _MOST_ROWS = 12, 40
_LEAST_SHARE = 0.02  # of a token's Σ|credit| for a row of its own, where the segments are many
_SMALL = 5e-5  # prints as zero with four decimals
_GAP = 3  # between two columns
_BLANK = " " * 8  # where a credit would stand

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# First words with a command of their own; whatever else comes first is a prompt.
COMMANDS: dict[str, typer.Typer] = {}


def main(words: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, 2 for bad input with one line on stderr, 130 when interrupted."""
    words = list(sys.argv[1:] if words is None else words)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for Δ
    name, chosen = "iglens", app
    if words and words[0] in COMMANDS:
        name, chosen = f"iglens {words[0]}", COMMANDS[words.pop(0)]
    try:
        status = chosen(words, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except (ValueError, OSError, NotImplementedError, RuntimeError) as error:
        status = _refuse(str(error))
    except Exception as error:
        usage = getattr(error, "format_message", None)  # whichever click typer was built on
        if usage is None:
            raise
        status = _refuse(f"{usage().rstrip('.')}; see {name} --help")
    raise SystemExit(status if isinstance(status, int) else 0)


def _refuse(message: str) -> int:
    print("iglens:", _one_line(message), file=sys.stderr)
    return 2


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _show_version(wanted: bool) -> bool:
    if wanted:
        hosts = ", ".join(f"{name} {version(name)}" for name in ("transformer-lens", "torch", "transformers"))
        print(f"iglens {version('tl-iglens')} ({hosts})")
        raise typer.Exit()
    return wanted


@app.command(epilog="Credits are changes of the token's probability; a token's credits sum to its Δp.")
def explain(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt, or - to read it from standard input.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face name or local folder.", show_default="embedded SmolLM2-135M-Instruct"
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Render the prompt through the chat template, or feed it as it stands.",
            show_default="--chat where the model has a template; --raw with --target or --bos",
        ),
    ] = None,
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos",
            help="Put the BOS token before a raw prompt.",
            show_default="as TransformerLens does; --no-bos for the embedded model",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer at most.")] = 80,
    target: Annotated[
        str | None,
        typer.Option(help="Explain this token as the continuation, not an answer.", show_default=False),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Boundaries of the path, such as 0,6,12.", show_default="all"),
    ] = None,
    mid: Annotated[bool, typer.Option("--mid", help="Split blocks into attention and MLP.")] = False,
    baseline: Annotated[str, typer.Option(help=f"Start of the path: {', '.join(BASELINES)}.")] = "embed",
    estimator: Annotated[str, typer.Option(help=f"{', '.join(ESTIMATORS)}.")] = "prediction_aware",
    n_steps: Annotated[int, typer.Option(help="Steps per segment.")] = 1,
    onset: Annotated[str, typer.Option(help=f"Rule of the onset: {', '.join(ONSET_RULES)}.")] = "mass",
    save: Annotated[
        Path | None, typer.Option(help="Write the result to this file (safetensors).", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report to this file (one offline page).", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print versions.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Which layers produce the probability of each token of the model's answer?"""
    prompt = sys.stdin.read().rstrip("\r\n") if prompt == "-" else prompt
    if not prompt.strip():
        fail("prompt", "some text", repr(prompt), "give it in quotes, or - to read standard input")
    check_choice("baseline", baseline, BASELINES)
    check_choice("estimator", estimator, ESTIMATORS)
    check_choice("onset", onset, ONSET_RULES)
    check_positive("n-steps", n_steps)
    check_positive("max-new-tokens", max_new_tokens)
    boundaries = _parse_layers(layers)
    _check_save("save", save)
    _check_save("html", html)

    progress = _Progress(sys.stderr.isatty() and not as_json)
    loaded = load_model(model, progress)
    if chat is None and (target is not None or bos is not None):
        chat = False
    if bos is None and model is None and (chat is False or loaded.tokenizer.chat_template is None):
        bos = False  # the embedded model knows its BOS as the start of a chat turn only
    options: dict[str, Any] = dict(
        layers=boundaries, incl_mid=mid, baseline=baseline, estimator=estimator, n_steps=n_steps
    )
    with progress.stage("explaining" if target is not None else "answering and explaining"):
        if target is None:
            options["prepend_bos"] = bos
            mode = "auto" if chat is None else chat
            result = explain_generation(loaded, prompt, max_new_tokens=max_new_tokens, chat=mode, **options)
        else:
            ids, _ = render_prompt(loaded, prompt, bool(chat), bos)
            result = ig_lens(loaded, [ids], targets=target, attention_mask=[[1] * len(ids)], **options)
    if save is not None:
        result.save(save)
    if html is not None:
        write_report(result, html, title=textwrap.shorten(prompt, 160, placeholder=" …"), onset_rule=onset)
    report = _Report(result, loaded.tokenizer, prompt, onset, target is not None)
    if as_json:
        print(json.dumps(report.as_dict(), allow_nan=False))
    else:
        report.show(save, html)


# --- input ---------------------------------------------------------------------------------------


def _parse_layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        fail("layers", "whole numbers separated by commas", repr(text), "for example 0,6,12")


def _check_save(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written before anything is computed."""
    if path is None:
        return
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        rule = "a file in an existing folder that can be written"
        fail(option, rule, repr(str(path)), "choose another place")


def load_model(name: str | None, progress: "_Progress | None" = None) -> Any:
    """The embedded model, or one by its Hugging Face name or local folder, raw weights in eval mode.

    A TransformerBridge with TransformerLens 3 or newer, a HookedTransformer before, which cannot read local
    folders. Raises ValueError in one line for a model that cannot be had.
    """
    progress = progress or _Progress(False)
    if name is None:
        try:
            from .demo import load_demo_model
        except ImportError as error:
            need = f'the embedded model needs {error.name}; run `pip install "tl-iglens[demo]"`'
            raise ValueError(need) from error
        return load_demo_model(progress=progress.shown)
    boot = _loader()
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            rule = "a folder with config.json, weights and tokenizer"
            fail("model", rule, repr(name), "see save_pretrained of transformers")
        if boot.__name__ == "from_pretrained_no_processing":
            got = f"the folder {name!r} with TransformerLens {version('transformer-lens')}"
            fail("model", "a Hugging Face name", got, 'install "transformer-lens>=3.9" to read local folders')
        name = str(folder)
    elif name.startswith((".", "/", "~", "\\")) or name.count("/") > 1:
        fail("model", "a Hugging Face name or an existing folder", repr(name), "check the path")
    try:
        with progress.loading(f"loading {name}"):
            return boot(name).eval()
    except Exception as error:  # of transformers, the hub or TransformerLens, and of any type
        reason = _one_line(str(error).strip().partition("\n")[0])[:200] or type(error).__name__
        rule = "a Hugging Face name or a local folder that TransformerLens can load"
        todo = f"check spelling and connection ({reason})"
        raise ValueError(f"model must be {rule}, got {name!r}; {todo}") from error


def _loader() -> Callable[..., Any]:
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        from transformer_lens import HookedTransformer

        return HookedTransformer.from_pretrained_no_processing
    return TransformerBridge.boot_transformers


class _Progress:
    """What is going on, on standard error and by rich; nothing at all unless ``shown``."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.console = Console(file=sys.stderr, quiet=not shown)

    @contextlib.contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """A pulse while something is computed; our warnings become one line each, other talk is dropped."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            with self.console.status(text), contextlib.redirect_stdout(sys.stderr):
                yield
        ours = (w for w in caught if Path(w.filename).is_relative_to(Path(__file__).parent))
        for note in dict.fromkeys(_one_line(str(warning.message)) for warning in ours):
            print("iglens: note:", note, file=sys.stderr)

    @contextlib.contextmanager
    def loading(self, text: str) -> Iterator[None]:
        """Loading by others: their download bars are seen where progress is shown, their talk never."""
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        self.console.print(f"{text} …", style="dim", markup=False, highlight=False)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                with contextlib.nullcontext() if self.shown else contextlib.redirect_stderr(io.StringIO()):
                    yield
        finally:
            logging.disable(disabled)


# --- output --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Report:
    """One result as a table and as JSON; row b = 0, a column per answer token."""

    result: IGLensResult
    tokenizer: Any
    prompt: str
    onset_rule: str
    is_target: bool

    @property
    def prompt_ids(self) -> list[int]:
        return self.result.tokens[0, : int(self.result.positions[0, 0]) + 1].tolist()

    @property
    def answer(self) -> str:
        return decode(self.tokenizer, self.result.targets[0].tolist())

    def as_dict(self) -> dict[str, Any]:
        """Everything that the table shows, of every segment, in full precision."""
        r, onset = self.result, self.result.onset(self.onset_rule)
        columns = []
        for p, token in enumerate(r.target_strings[0]):
            found = int(onset.index[0, p]) >= 0
            columns.append(
                {
                    "token": token,
                    "id": int(r.targets[0, p]),
                    "pos": int(r.positions[0, p]),
                    "onset": {
                        "segment": onset.labels[0][p] if found else None,
                        "boundary": int(onset.boundary[0, p]) if found else None,
                    },
                    "model": float(r.model_level[0, p]),
                    "delta": float(r.delta[0, p]),
                    "sum": float(r.attribution[:, 0, p].double().sum()),
                    "credits": r.attribution[:, 0, p].tolist(),
                    "levels": r.levels[:, 0, p].tolist(),
                }
            )
        return {
            "version": version("tl-iglens"),
            "info": asdict(r.info),
            "prompt": self.prompt,
            "fed": decode(self.tokenizer, self.prompt_ids),
            "ids": r.tokens[0].tolist(),
            "prompt_length": len(self.prompt_ids),
            "answer": self.answer,
            "onset_rule": self.onset_rule,
            "segments": list(r.labels),
            "boundaries": list(r.boundaries),
            "points": list(r.point_labels),
            "columns": columns,
        }

    def show(self, saved: Path | None, page: Path | None = None) -> None:
        """Print the receipts and what the numbers are."""
        console = stdout_console()
        width = console.width
        console.print(_line("prompt", self.prompt, width))
        title, said = ("target", token_label(self.answer)) if self.is_target else ("answer", self.answer)
        console.print(_line(title, said))
        for cells in self._pages(width):
            rows = self._rows(cells)
            table = self._table(cells, rows)
            console.print()
            least = Measurement.get(console, console.options.update(width=10_000), table).maximum
            console.print(table, width=max(width, least), crop=False)  # numbers are never squeezed
            if left_out := self._left_out(cells, rows):
                console.print(Text(left_out, "dim"))
        console.print()
        gap = float(self.result.readout_gap.abs().max())
        for line in (
            "segment: its credit → the lens level at its end; · no change; Σ: sum of the credits",
            f"{self.result.caption()} · |level − model| ≤ {gap:.1e} · onset by {self.onset_rule}",
            *self.result.info.notes,
            *([] if saved is None else [f"saved to {saved}"]),
            *([] if page is None else [f"report in {page}, for any browser"]),
        ):
            console.print(Text(line, "dim"))
        text, count = decode(self.tokenizer, self.prompt_ids), len(self.prompt_ids)
        console.print(_line(f"fed, {count} tokens", text, width * _FED_LINES), style="dim")
        console.print(_line("ids", " ".join(map(str, self.prompt_ids)), width * _FED_LINES), style="dim")

    def _pages(self, width: int) -> Iterator[list[int]]:
        """Runs of tokens whose receipts fit beside each other; at least one in every run."""
        onset = self.result.onset(self.onset_rule).labels[0]
        used = first = max(map(len, ("p of the model", *self.result.labels)))
        page: list[int] = []
        for p, token in enumerate(self.result.target_strings[0]):
            needed = _GAP + max(len(_BLANK + _level(0.0)), cell_len(_token(token)), len(onset[p]))
            if page and used + needed > width:
                yield page
                page, used = [], first
            page.append(p)
            used += needed
        yield page

    def _rows(self, cells: list[int]) -> list[int]:
        """All segments where they are few; else up to 40 with at least 2 % of some token's Σ|credit|."""
        if len(self.result.labels) <= _FEW_ROWS:
            return list(range(len(self.result.labels)))
        size = self.result.attribution[:, 0, cells].double().abs()
        share = (size / size.sum(0).clamp_min(_SMALL)).amax(-1)
        heaviest = share.argsort(descending=True, stable=True).tolist()[:_MOST_ROWS]
        return sorted(s for s in heaviest if share[s] >= _LEAST_SHARE)

    def _table(self, cells: list[int], rows: list[int]) -> Table:
        """Receipts of some tokens beside each other: start, credits, the others' sum, totals."""
        r, onset = self.result, self.result.onset(self.onset_rule)
        credit, levels = r.attribution[:, 0].double(), r.levels[:, 0].tolist()
        rest = [s for s in range(len(r.labels)) if s not in rows]
        name = "p" if r.info.quantity == "prob" else r.info.quantity
        table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
        table.add_column("token", no_wrap=True)
        for p in cells:
            table.add_column(Text(_token(r.target_strings[0][p])), no_wrap=True)
        table.add_row("start", *(Text(_BLANK + _level(levels[0][p]), "dim") for p in cells))
        for s in rows:
            decided = (onset.index[0] == s).tolist()
            line = (_credit(float(credit[s, p]), levels[s + 1][p], decided[p]) for p in cells)
            table.add_row(r.labels[s], *line)
        if rest:
            table.add_row("other", *(_credit(float(credit[rest, p].sum())) for p in cells))
        table.add_section()
        table.add_row("Σ", *(f"{credit[:, p].sum():+.4f}" for p in cells))
        table.add_row(f"Δ{name}", *(f"{r.delta[0, p]:+.4f}" for p in cells))
        table.add_row(f"{name} of the model", *(f" {r.model_level[0, p]:.4f}" for p in cells))
        table.add_row("onset", *(onset.labels[0][p] for p in cells))
        return table

    def _left_out(self, cells: list[int], rows: list[int]) -> str:
        """In one line what the row ``other`` gathers."""
        labels = self.result.labels
        rest = [s for s in range(len(labels)) if s not in rows]
        if not rest:
            return ""
        largest = float(self.result.attribution[rest, 0][:, cells].abs().max())
        which = _runs(labels, rest)
        return f"other: {len(rest)} of {len(labels)} segments ({which}), none beyond ±{largest:.4f}"


def _credit(value: float, level: float | None = None, is_onset: bool = False) -> Text:
    """A credit with its sign, and the level it leads to."""
    if abs(value) < _SMALL:
        return Text("     ·", "dim")
    style = "green" if value > 0 else "red"
    cell = Text(f"{value:+.4f}", style=f"bold {style}" if is_onset else style)
    return cell if level is None else cell.append(f" {_level(level)}", "not bold dim default")


def _level(value: float) -> str:
    return f"→{value:.4f}"


def _token(text: str) -> str:
    label = _printable(token_label(text))
    return label if len(label) <= _LONGEST_TOKEN else f"{label[: _LONGEST_TOKEN - 1]}…"


def _line(title: str, text: str, room: int | None = None) -> Text:
    """A titled text, in full or its middle left out where it is longer than ``room``."""
    shown = _printable(text.replace("\n", "⏎"))
    if room is not None and len(title) + 2 + len(shown) > room:
        half = max(8, (room - len(title) - 5) // 2)
        shown = f"{shown[:half]} … {shown[-half:]}"
    return Text.assemble((f"{title}: ", "bold"), shown)


def _printable(text: str) -> str:
    """Text without characters that a terminal would act on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _runs(labels: Sequence[str], chosen: Sequence[int]) -> str:
    """Labels of some segments, three and more neighbours as a range: ``0_block … 19_block, 22_block``."""
    runs: list[list[int]] = []
    for s in chosen:
        if runs and s == runs[-1][-1] + 1:
            runs[-1].append(s)
        else:
            runs.append([s])
    parts = [[labels[s] for s in r] if len(r) < 3 else [f"{labels[r[0]]} … {labels[r[-1]]}"] for r in runs]
    return ", ".join(label for part in parts for label in part)


COMMANDS.update(commands(load_model))
