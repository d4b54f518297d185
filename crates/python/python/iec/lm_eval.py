# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""A model class for lm-evaluation-harness 0.4, which is registered as ``iec`` when this module is imported. The harness
has no other way for classes of other packages, so that its program is started from here:

    python -m iec.lm_eval --model iec --model_args model=packs/tinyllama --tasks TASK

``model`` is what ``iec.Engine`` opens; without it, the embedded model answers. Further arguments are options of the
engine, and ``max_length``, ``max_gen_toks``, ``add_bos_token``, ``prefix_token_id`` as those of the model ``hf``. Needs
neither torch nor transformers.

Conversations (``--apply_chat_template``) are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from .engine import Engine
from .results import Token

__all__ = ["IecLM", "main"]

# The largest number of stop texts of a request; others are looked for in the answer.
_MOST_STOPS = 16


@register_model("iec")
class IecLM(TemplateLM):  # type: ignore[misc]
    """A model that ``iec`` runs."""

    def __init__(
        self,
        model: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if device is not None:
            options["device"] = device
        self.engine = Engine.embedded(**options) if model is None else Engine(str(model), **options)
        self.model = "embedded" if model is None else str(model)
        described = self.engine.describe()
        self.max_length = min(max_length or described["context"], described["context"])
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._end: int = described["end_tokens"][0]
        special = self.engine.tokenize("", True)
        self._prefix = prefix_token_id if prefix_token_id is not None else (special[0] if special else self._end)

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context: that of the beginning if the tokenizer has one."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """Name for the harness's cache of requests."""
        return self.model.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encodes a text, with the special tokens of the tokenizer unless the text begins with them."""
        special = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.engine.detokenize([self._prefix]) or "\0"):
            special = False
        return self.engine.tokenize(string, special is not False)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        # The beginning is cut off where the text is longer than the context, of which the last token is only predicted.
        wholes = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        # Neighbours with the same context share its computation.
        order = sorted(range(len(wholes)), key=lambda at: wholes[at])
        short = [at for at in order if len(wholes[at]) <= self.max_length]
        found = self.engine.score([wholes[at] for at in short], top=1) if short else []
        scores = dict(zip(short, found))
        results = []
        for at, (_, _, continuation) in enumerate(requests):
            tokens = scores.get(at)
            if tokens is None:
                tokens = self._score_beyond(wholes[at])
            tokens = tokens[-len(continuation) :] if continuation else []
            total = sum(token.logprob or 0.0 for token in tokens)
            results.append((total, all(token.top[0][0] == token.id for token in tokens)))
            if requests[at][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[at][0], results[-1])
        return results

    def _score_beyond(self, ids: list[int]) -> list[Token]:
        """Scores a text with one token more than the context, from the logits of the others."""
        import numpy

        scores = self.engine.score(ids[:-1], top=1)
        last = self.engine.logits(ids[:-1])[-1].astype(numpy.float64)
        last -= last.max()
        last -= numpy.log(numpy.exp(last).sum())
        best = int(last.argmax())
        return [*scores, Token(ids[-1], float(last[ids[-1]]), [(best, float(last[best]))])]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Computes the log-likelihood of whole texts, in windows if they are longer than the context."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for at, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(at)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows)):
            totals[owner] += logprob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues texts until a stop text; those with the same settings are computed together."""
        groups: dict[str, list[int]] = {}
        for at, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(at)
        texts = [""] * len(requests)
        for members in groups.values():
            kwargs = dict[str, Any](normalize_gen_kwargs(requests[members[0]].args[1], self.max_gen_toks))
            until = [text for text in kwargs.pop("until", []) if text]
            most = int(kwargs.pop("max_gen_toks"))
            if kwargs.pop("do_sample", False) is False:
                kwargs["temperature"] = 0.0
            room = self.max_length - most
            if room <= 0:
                raise ValueError(f"max_gen_toks: found {most}, expected less than the context, {self.max_length}")
            prompts = [self.tok_encode(requests[at].args[0])[-room:] for at in members]
            fields = {**kwargs, "max_tokens": most, "stop": until[:_MOST_STOPS]}
            for at, result in zip(members, self.engine.generate(prompts, **fields)):
                texts[at] = _cut(result.text, until)
                self.cache_hook.add_partial("generate_until", requests[at].args, texts[at])
        return texts


def _cut(text: str, until: Sequence[str]) -> str:
    for stop in until:
        text = text.split(stop)[0]
    return text


def main() -> None:
    """Starts the program of the harness."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
