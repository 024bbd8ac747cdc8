"""`transformers` on CPU as the other side of a comparison: the same weights, prompts and stops, in the same process."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import machine
from experiments.measure import Timed
from models import hf
from models.target import LlamaTarget


class Peer:
    """A target's weights in `transformers`, decoding greedily, one prompt at a time.

    Args:
      target: whose weights are handed over, through a model folder as `models.hf.save` writes it.

    Attributes:
      name: with versions.

    Raises:
      ValueError: the extra is not installed, or the target cannot be handed over.
    """

    def __init__(self, target: LlamaTarget):
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ValueError(
                f"--peer hf needs the packages torch and transformers ({error}): pip install 'spec-jax[peer]'"
            ) from None
        if not isinstance(target, LlamaTarget) or target.config.dtype != "float32":
            raise ValueError("the peer takes the float32 weights of a model loaded by models.load")
        self.name = f"transformers {transformers.__version__} (torch {torch.__version__})"
        self._torch = torch
        torch.set_num_threads(machine.cores())
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            hf.save(target, Path(folder))
            self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Nothing but what `generate` is told below.
        self._model.generation_config = transformers.GenerationConfig()
        self._stops = list(target.eos_token_ids)
        self._ended_prefill = 0.0
        self._clock = transformers.StoppingCriteriaList([self._note_first_token])

    def _note_first_token(self, input_ids, scores, **_):
        self._ended_prefill = self._ended_prefill or time.perf_counter()
        return self._torch.zeros(len(input_ids), dtype=self._torch.bool)

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, ignore_eos: bool, lookup_tokens: int | None = None
    ) -> Timed:
        """Greedy generation.

        Args:
          prompt: token ids.
          max_new_tokens: the budget.
          ignore_eos: do not stop at the model's end-of-text tokens.
          lookup_tokens: with prompt lookup of that many tokens; plainly if None.
        """
        options = {} if lookup_tokens is None else {"prompt_lookup_num_tokens": lookup_tokens}
        if self._stops and not ignore_eos:
            options["eos_token_id"] = self._stops
            options["pad_token_id"] = self._stops[0]
        self._ended_prefill = 0.0
        started = time.perf_counter()
        with self._torch.inference_mode():
            input_ids = self._torch.tensor([list(prompt)])
            output = self._model.generate(
                input_ids,
                attention_mask=self._torch.ones_like(input_ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
                stopping_criteria=self._clock,
                **options,
            )
        tokens = output[0, len(prompt) :].tolist()
        ended = time.perf_counter()
        # The first token (with lookup: the first run of tokens) comes out of prefill.
        return Timed([tokens], ended - started, ended - self._ended_prefill, max(len(tokens) - 1, 0))
