"""What the core needs to sample with: the vocabulary for structures, and a fresh state for every request."""

from headrace.core.errors import UserError
from headrace.engine.sampling.spec import Structured
from headrace.engine.sampling.state import SamplerState
from headrace.engine.sampling.structured import Compiled, compile_structured
from headrace.engine.sampling.vocabulary import GrammarVocabulary
from headrace.engine.submission import Submission
from headrace.models.deepseek_v41.architecture import Config
from headrace.text.tokenizer import Tokenizer


class Samplers:
    """Makes sampler states. Owns the vocabulary that structures are compiled for, made when first needed."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None) -> None:
        self.vocab_size = config.vocab_size if tokenizer is None else min(config.vocab_size, tokenizer.size)
        self._eos_token_id = config.eos_token_id
        self._tokenizer = tokenizer
        self._vocabulary: GrammarVocabulary | None = None

    def compile(self, structured: Structured) -> Compiled:
        """Compile a structure for this vocabulary; one thread at a time may do so.

        Raises:
            UserError: it is refused, or the checkpoint has no tokenizer.
        """
        if self._tokenizer is None:
            raise UserError("the checkpoint has no tokenizer.json, so no structure can be asked for", "structured")
        if self._vocabulary is None:
            self._vocabulary = GrammarVocabulary(self._tokenizer, self._eos_token_id)
        return compile_structured(structured, self._vocabulary)

    def start(self, submission: Submission, compiled: Compiled | None) -> SamplerState:
        """Return the state at the end of a prompt; its structure is compiled here if nobody did before.

        Raises:
            UserError: an id or the structure is refused.
        """
        structured = submission.params.structured
        if structured is not None and compiled is None:
            compiled = self.compile(structured)
        return SamplerState(
            submission.params,
            submission.prompt_ids,
            seed=submission.seed,
            eos_token_id=self._eos_token_id,
            vocab_size=self.vocab_size,
            matcher=None if compiled is None else compiled.start(),
        )
