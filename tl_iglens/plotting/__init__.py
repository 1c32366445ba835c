"""Figures of results. Every function returns a ``plotly.graph_objects.Figure`` and does nothing else.

Nothing is shown, written or set: the last expression of a notebook cell draws a figure, ``figure.show()``
opens it, ``figure.write_html(path, include_plotlyjs=True)`` makes a page that needs no network.
All functions take ``title`` (shown literally), ``template`` (None for plotly's default), ``width`` and
``height`` in pixels. The line under a title states quantity, baseline, estimator, model and completeness gap.
"""

from .ablation import ablation
from .baselines import baselines
from .comparison import comparison
from .components import components
from .corpus import mean_credit, onset_histogram, top_prompts
from .flow import candidates, flow
from .heatmap import heatmap
from .trajectory import trajectory
from .waterfall import waterfall

__all__ = [
    "ablation",
    "baselines",
    "candidates",
    "comparison",
    "components",
    "flow",
    "heatmap",
    "mean_credit",
    "onset_histogram",
    "top_prompts",
    "trajectory",
    "waterfall",
]
