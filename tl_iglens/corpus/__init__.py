"""Many prompts: one row per analysed token in a Parquet dataset, resumable, here or on many machines.

    from tl_iglens import corpus
    from tl_iglens.demo import load_demo_model

    table = corpus.run(load_demo_model, "prompts.jsonl", "ig_lens", "out", column="text", progress=True)
    table.to_pandas(columns=["prompt_id", "token", "target", "p_model", "onset_mass"])
    table.onset_histogram()
    corpus.load("out")            # later, elsewhere; lazy
"""

from .reading import Corpus, load, token_class
from .runner import run
from .worker import PromptTooLongError

__all__ = ["Corpus", "PromptTooLongError", "load", "run", "token_class"]
