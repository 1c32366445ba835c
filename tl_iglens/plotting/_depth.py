"""Depth as a number: boundaries, states inside blocks and baselines on one axis."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._labels import tick


def depth(label: str, n_layers: int) -> float:
    """Where TransformerLens' name of a state lies: ``3_pre`` at 3, ``3_mid`` at 3.5, ``final_post`` at n."""
    if label == "final_post":
        return float(n_layers)
    block, _, place = label.partition("_")
    if block.isdigit() and place in ("pre", "mid", "post"):
        return int(block) + {"pre": 0.0, "mid": 0.5, "post": 1.0}[place]
    return float("nan")


def depths(labels: Sequence[str], n_layers: int) -> np.ndarray:
    """Depths of the points of a path; one that is no state of the run stands a step before the next."""
    places = np.array([depth(label, n_layers) for label in labels])
    if np.isnan(places[0]):
        places[0] = places[1] - 1 if len(places) > 1 else -1
    return places


def spans(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Middle and width of the bar of every segment between consecutive points."""
    return (places[:-1] + places[1:]) / 2, np.diff(places) * 0.86


def depth_axis(labels: Sequence[str], n_layers: int) -> dict[str, Any]:
    """An axis of depth with the names of the points; of very many only some, the last always among them."""
    places = depths(labels, n_layers)
    every = int(np.ceil(len(labels) / 64))
    shown = list(range(len(labels)))[::-1][::every][::-1]
    return {
        "type": "linear",
        "tickmode": "array",
        "tickvals": [float(places[i]) for i in shown],
        "ticktext": [tick(labels[i]) for i in shown],
        "tickangle": -90 if len(shown) > 14 else 0,
        "tickfont": {"size": 11},
        "range": [float(places.min()) - 0.6, float(places.max()) + 0.6],
        "zeroline": False,
    }
