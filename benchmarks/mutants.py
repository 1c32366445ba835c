"""Would the tests notice? ``python -m benchmarks.mutants`` breaks the package in one place at a time and looks.

Each mutant is a fault that someone could make: a norm left out, a bias dropped, a boundary off by one. It names the
place, what stands there, what is put instead, and the few tests that have to fail. The repository is copied to a
temporary folder, so nothing here is touched. The exit status is 1 where a mutant survives, where the place is no
longer found exactly once, or where the tests fail without any mutant.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutant:
    """One fault: in ``file`` the text ``old``, found once, becomes ``new``; one of ``tests`` has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def lens(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_lens.py::{name}" for name in names)


MUTANTS = (
    # --- the readout
    Mutant(
        "no final norm", "tl_iglens/readout.py",
        "self.norm = FinalNorm(getattr(model, \"ln_final\", None) if has_norm(model) else None)",
        "self.norm = FinalNorm(None)",
        lens("test_last_level_is_the_models_own_output"),
    ),
    Mutant(
        "norm statistics of the first row reused for all", "tl_iglens/head.py",
        "            return self.module(rows[None].to(self.device or rows.device))[0].to(rows.device)",
        "            return (rows / rows[-1:].norm() * self.module(rows[None, -1:]).norm()).to(rows.device)",
        lens("test_levels_are_the_readout_of_every_boundary"),
    ),
    Mutant(
        "unembedding without its bias", "tl_iglens/readout.py",
        "    return weight, bias if bias is not None and bool(bias.any()) else None",
        "    return weight, None",
        ("tests/test_readout.py::test_value_is_the_softmax_of_the_models_modules",),
    ),
    Mutant(
        "soft cap forgotten for HookedTransformer and bridge", "tl_iglens/head.py",
        "        return logits if self.is_identity or self.function is None else self.function(logits)",
        "        return logits",
        ("tests/test_readout.py::test_value_is_the_softmax_of_the_models_modules",),
    ),
    Mutant(
        "output transform before the bias", "tl_iglens/readout.py",
        "        return self.transform(out).to(self.acc_dtype)",
        "        return (self.transform(torch.mm(x, weight)) + (0 if self.b_U is None else self.b_U[start:stop])).to(self.acc_dtype)",
        ("tests/test_readout.py::test_value_is_the_softmax_of_the_models_modules", "tests/test_collect.py::test_cohere_scales_its_logits_once_or_twice", "tests/test_mutants_gaps.py"),
    ),
    Mutant(
        "scale applied although it is folded into the weights", "tl_iglens/readout.py",
        "        self.transform = OutputTransform(None, self.dtype, self.device)\n        self.is_bare = True",
        "        self.is_bare = True",
        ("tests/test_collect.py::test_cohere_scales_its_logits_once_or_twice",),
    ),
    Mutant(
        "last tile of the vocabulary lost", "tl_iglens/readout.py",
        "        while start < self.d_vocab:",
        "        while start < self.d_vocab - self._tile_width(len(x)) or start == 0:",
        lens("test_tiles_change_nothing", "test_vocabularies_that_tiles_do_not_divide"),
    ),
    Mutant(
        "tiles overlap by one token", "tl_iglens/readout.py",
        "            start = stop\n",
        "            start = stop - 1 if stop < self.d_vocab else stop\n",
        lens("test_tiles_change_nothing", "test_vocabularies_that_tiles_do_not_divide"),
    ),
    Mutant(
        "running sum not rescaled when the maximum grows", "tl_iglens/readout.py",
        "            self.total *= rescale[:, 0]",
        "            pass",
        lens("test_tiles_change_nothing"),
    ),
    Mutant(
        "gradient of log Z without the scale of the output", "tl_iglens/readout.py",
        "            mean[rows] *= (self.transform.scale if self.transform.is_linear else 1.0) / stream.total[:, None]",
        "            mean[rows] *= 1.0 / stream.total[:, None]",
        ("tests/test_readout.py::test_gradient_is_that_of_autograd",),
    ),
    Mutant(
        "gradient of a centred norm without its mean term", "tl_iglens/head.py",
        "            projected = projected - pulled.mean(-1, keepdim=True)",
        "            pass",
        ("tests/test_readout.py::test_gradient_is_that_of_autograd",),
    ),
    Mutant(
        "epsilon of the norm left out of its gradient", "tl_iglens/head.py",
        "        sigma = (shifted.square().mean(-1, keepdim=True) + eps).sqrt()",
        "        sigma = shifted.square().mean(-1, keepdim=True).sqrt()",
        ("tests/test_readout.py::test_gradient_is_that_of_autograd", "tests/test_readout.py::test_gradient_at_states_of_any_size"),
    ),
    Mutant(
        "hooks of the caller not put back", "tl_iglens/head.py",
        "            own[name] = value",
        "            pass",
        ("tests/test_readout.py::test_hooks_of_the_caller_are_set_aside_and_put_back",),
    ),
    Mutant(
        "hooks of the caller see the readout's rows", "tl_iglens/head.py",
        "        for part in module.modules() if module is not None else ():",
        "        for part in ():",
        lens("test_readout_rows_do_not_meet_the_callers_hooks"),
    ),
    # --- what is measured
    Mutant(
        "logarithm in place of the probability", "tl_iglens/quantity.py",
        "            return (self._sign(z) * (z - log_z[..., None]).exp()).sum(-1)",
        "            return (self._sign(z) * (z - log_z[..., None])).sum(-1)",
        ("tests/test_quantity.py::test_value_is_the_definition",),
    ),
    Mutant(
        "incorrect targets counted in favour", "tl_iglens/tokens.py",
        "    signs = [(ids >= 0).double() * (-1 if turn else 1) for turn, ids in enumerate(groups)]",
        "    signs = [(ids >= 0).double() for turn, ids in enumerate(groups)]",
        ("tests/test_tokens.py::test_incorrect_targets_count_against",),
    ),
    Mutant(
        "members of a token set counted twice", "tl_iglens/tokens.py",
        "        return tuple(dict.fromkeys(ids))",
        "        return tuple(ids)",
        ("tests/test_tokens.py::test_sets_sum_their_members_once",),
    ),
    Mutant(
        "the token itself as its next one", "tl_iglens/tokens.py",
        "    ids = prompts.ids.gather(1, (kept + 1).clamp(0, prompts.ids.shape[1] - 1))",
        "    ids = prompts.ids.gather(1, kept.clamp(0, prompts.ids.shape[1] - 1))",
        ("tests/test_tokens.py::test_next_tokens_follow_their_position",),
    ),
    # --- prompts and states
    Mutant(
        "a pad taken for the last token", "tl_iglens/tokens.py",
        "        return [(row[0], row[-1] + 1) for row in found]",
        "        return [(row[0], self.mask.shape[1]) for row in found]",
        ("tests/test_tokens.py::test_slices_are_those_of_transformer_lens_on_the_real_tokens",),
    ),
    Mutant(
        "left-padded rows not moved to the left edge", "tl_iglens/collect.py",
        "    places = torch.where(positions[rows] >= 0, positions[rows] - moved[:, None], NO_POSITION)",
        "    places = positions[rows]",
        lens("test_rows_of_a_padded_batch_equal_their_solo_runs"),
    ),
    Mutant(
        "a masked token in the middle is read", "tl_iglens/collect.py",
        "    if prompts.has_gaps or infers_mask:",
        "    if False:",
        ("tests/test_collect.py::test_a_masked_middle_token_stays_masked", "tests/test_collect.py::test_text_of_different_length_is_its_solo_run"),
    ),
    Mutant(
        "the mean baseline over pads too", "tl_iglens/collect.py",
        "        weight = mask.to(compute_dtype(act.dtype)) / mask.sum(1, keepdim=True)",
        "        weight = torch.ones_like(mask, dtype=compute_dtype(act.dtype)) / mask.shape[1]",
        lens("test_mean_baseline_is_over_real_positions_only"),
    ),
    Mutant(
        "boundary l read after block l", "tl_iglens/collect.py",
        "        names[Point(block + 1)] = f\"blocks.{block}.hook_resid_post\"",
        "        names[Point(block + 1)] = f\"blocks.{min(block + 1, n_layers - 1)}.hook_resid_post\"",
        ("tests/test_collect.py::test_states_are_those_of_the_hooks",),
    ),
    Mutant(
        "states are views that a later edit reaches", "tl_iglens/collect.py",
        "        self.resid[i] = self.take(act)",
        "        self.resid[i] = act[:, : self.places.shape[1]] * 1.0000001 if act.shape[1] > 3 else self.take(act)",
        ("tests/test_collect.py::test_only_the_asked_positions_are_kept",),
    ),
    Mutant(
        "the unembedding's hook left on the model", "tl_iglens/collect.py",
        "        self.handle.remove()",
        "        pass",
        lens("test_many_calls_leave_as_many_hooks_as_one", "test_no_trace"),
    ),
    Mutant(
        "gradients recorded in the forward", "tl_iglens/collect.py",
        "    with torch.no_grad(), model.hooks(fwd_hooks=list(fwd_hooks)):",
        "    with model.hooks(fwd_hooks=list(fwd_hooks)):",
        ("tests/test_mutants_gaps.py",),
    ),
    # --- path and estimators
    Mutant(
        "a merged segment that starts one block late", "tl_iglens/path.py",
        "        bounds = (0, *bounds)",
        "        bounds = (1, *bounds) if bounds[0] > 1 else (0, *bounds)",
        ("tests/test_path.py::test_labels_and_boundaries",),
    ),
    Mutant(
        "the last boundary not added", "tl_iglens/path.py",
        "    return path if path[-1] == n_layers else (*path, n_layers)",
        "    return path",
        ("tests/test_path.py",),
    ),
    Mutant(
        "half the steps", "tl_iglens/path.py",
        "    index = torch.arange(n_segments * n_steps + 1)",
        "    n_steps = max(1, n_steps // 2)\n    index = torch.arange(n_segments * n_steps + 1)",
        ("tests/test_path.py::test_shared_grid_visits_every_point_once", "tests/test_estimators.py"),
    ),
    Mutant(
        "left and right rule exchanged", "tl_iglens/estimators.py",
        "    steps = {\"left\": left, \"right\": right, \"trapezoid\": (left + right) / 2}[rule]",
        "    steps = {\"left\": right, \"right\": left, \"trapezoid\": (left + right) / 2}[rule]",
        ("tests/test_estimators.py::test_rules_equal_a_loop",),
    ),
    Mutant(
        "midpoints at the left of their step", "tl_iglens/estimators.py",
        "    return (torch.arange(n, dtype=torch.float64) + 0.5) / n, torch.full((n,), 1 / n, dtype=torch.float64)",
        "    return torch.arange(n, dtype=torch.float64) / n, torch.full((n,), 1 / n, dtype=torch.float64)",
        ("tests/test_estimators.py::test_rules_equal_a_loop",),
    ),
    Mutant(
        "equal states with different credit", "tl_iglens/estimators.py",
        "    if not bool(still.any()):\n        return values",
        "    return values",
        ("tests/test_estimators.py::test_equal_ends_have_credit_exactly_zero", *lens("test_an_identity_block_has_credit_exactly_zero")),
    ),
    # --- the receipt
    Mutant(
        "the model's own output not compared", "tl_iglens/lens.py",
        "    bad = ~(gap <= tolerance * (1 if quantity == \"prob\" else model_level.cpu().abs().clamp_min(1)))",
        "    bad = gap < 0",
        ("tests/test_errors.py", "tests/test_mutants_gaps.py"),
    ),
    Mutant(
        "settled at the first crossing", "tl_iglens/result.py",
        "            last_below = (below * torch.arange(1, len(below) + 1)[:, None, None]).max(0).values",
        "            last_below = below.long().argmin(0)",
        ("tests/test_result.py::test_onset",),
    ),
    Mutant(
        "onset of signed in place of absolute credit", "tl_iglens/result.py",
        "            reached = credit.abs().cumsum(0) >= fraction * size - slack",
        "            reached = credit.cumsum(0) >= fraction * size - slack",
        ("tests/test_result.py::test_onset",),
    ),
    # --- components
    Mutant(
        "what the gradient misses is not shared out", "tl_iglens/components.py",
        "                credit.index_add_(1, cell, shares.double() + weight * miss)",
        "                credit.index_add_(1, cell, shares.double())",
        ("tests/test_components.py::test_components_of_a_segment_sum_to_its_credit",),
    ),
    Mutant(
        "heads in the wrong order", "tl_iglens/writers.py",
        "        by_component = \"step (component feature) -> step component feature\"",
        "        by_component = \"step (feature component) -> step component feature\"",
        ("tests/test_components.py::test_units_refine_each_other",),
    ),
    Mutant(
        "the gain behind a sublayer left out", "tl_iglens/writers.py",
        "        pulled = gradient if self.gain is None else gradient * self.gain.to(gradient)",
        "        pulled = gradient",
        ("tests/test_components.py::test_families_of_bridges", "tests/test_components.py::test_kinds_of_hooked_blocks"),
    ),
    # --- ablations
    Mutant(
        "skip at the token before", "tl_iglens/sites.py",
        "            return torch.arange(0 if at == \"all\" else last, last + 1)",
        "            return torch.arange(0 if at == \"all\" else max(last - 1, 0), max(last, 1) if at != \"all\" else last + 1)",
        ("tests/test_ablation.py::test_without_the_last_block_the_target_has_the_level_before_it", "tests/test_ablation.py::test_skip_at_the_target_leaves_other_positions_alone"),
    ),
    Mutant(
        "one seed for all rows", "tl_iglens/sites.py",
        "        digest = hashlib.sha256(repr((self.seed, ids, *more)).encode()).digest()",
        "        digest = hashlib.sha256(repr((self.seed, *more)).encode()).digest()",
        ("tests/test_ablation.py", "-k", "draws or noise or resample or padded"),
    ),
    Mutant(
        "a row resampled from itself", "tl_iglens/sites.py",
        "        others = [i for i, ids in enumerate(self.reference.ids) if ids != own]",
        "        others = list(range(len(self.reference.ids)))",
        ("tests/test_ablation.py::test_resample_never_takes_the_row_itself",),
    ),
    Mutant(
        "noise of another size", "tl_iglens/sites.py",
        "            scale = _norm(own.double().cpu()) / _norm(noise)",
        "            scale = 1.0",
        ("tests/test_ablation.py::test_noise_has_the_norm_of_what_it_replaces",),
    ),
    # --- lenses and figures
    Mutant(
        "rank counted from the other end", "tl_iglens/watchers.py",
        "        above = logits > self.score[rows]",
        "        above = logits < self.score[rows]",
        ("tests/test_methods_lenses.py", "-k", "rank"),
    ),
    Mutant(
        "token text in a figure not escaped", "tl_iglens/plotting/_labels.py",
        "    return text.translate(_ESCAPES)",
        "    return text",
        ("tests/test_plotting.py", "-k", "markup or escape or literal or text"),
    ),
)  # fmt: skip


def copy_of_the_repository(folder: Path) -> Path:
    """The files that git knows or would take, without history and environments."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    return folder


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Exit status of pytest on a copy, and the end of what it said."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout[-1500:]


def kill(mutant: Mutant, folder: Path) -> tuple[str, str]:
    """``killed``, ``survived`` or what is wrong with the mutant itself; the copy is put right afterwards."""
    path = folder / mutant.file
    before = path.read_text("utf-8")
    if before.count(mutant.old) != 1:
        return "not applied", f"its text stands {before.count(mutant.old)} times in {mutant.file}"
    path.write_text(before.replace(mutant.old, mutant.new), "utf-8")
    try:
        status, said = run_tests(folder, mutant.tests)
    finally:
        path.write_text(before, "utf-8")
    verdicts = {0: "survived", 1: "killed"}
    return verdicts.get(status, f"not run (pytest {status})"), said


def unbroken(folder: Path, mutants: list[Mutant]) -> str:
    """What the tests say without a mutant; empty where all pass."""
    for selection in dict.fromkeys(mutant.tests for mutant in mutants if "-k" in mutant.tests):
        status, said = run_tests(folder, selection)
        if status:
            return said
    plain = tuple(dict.fromkeys(test for mutant in mutants if "-k" not in mutant.tests for test in mutant.tests))
    status, said = run_tests(folder, plain) if plain else (0, "")
    return said if status else ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="mutants whose name or file contains this")
    parser.add_argument("--jobs", type=int, default=1, help="copies to work in at once")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.only or options.only in m.name or options.only in m.file]
    begun, verdicts = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as temporary:
        copies: Queue[Path] = Queue()
        for number in range(options.jobs):
            copies.put(copy_of_the_repository(Path(temporary) / str(number)))
        first = copies.get()
        said = unbroken(first, chosen)
        copies.put(first)
        if said:
            raise SystemExit(f"{said}\nthe tests fail without any mutant")

        def one(mutant: Mutant) -> tuple[Mutant, str, str]:
            folder = copies.get()
            try:
                return mutant, *kill(mutant, folder)
            finally:
                copies.put(folder)

        with ThreadPoolExecutor(options.jobs) as pool:
            for mutant, verdict, said in pool.map(one, chosen):
                verdicts[mutant.name] = verdict
                print(f"{verdict:12} {mutant.name} ({mutant.file})", flush=True)
                if verdict != "killed":
                    print(said, flush=True)
    killed = sum(verdict == "killed" for verdict in verdicts.values())
    print(f"{killed} of {len(verdicts)} mutants killed in {time.perf_counter() - begun:.0f} s")
    raise SystemExit(0 if killed == len(verdicts) else 1)


if __name__ == "__main__":
    main()
