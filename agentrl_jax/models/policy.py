"""A policy as training hands it around: weights, and the tokenizer they speak. On disk it is a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path

from agentrl_jax.chat.renderer import CHAT_TEMPLATE
from agentrl_jax.chat.tokenizer import ChatTokenizer
from agentrl_jax.models import pretrained
from agentrl_jax.models.decoder import ModelConfig, Params
from agentrl_jax.models.hf_config import PretrainedError


@dataclass(frozen=True)
class Policy:
    """model: shape of the decoder; params: its weights; tokenizer: text to ids and back."""

    model: ModelConfig
    params: Params
    tokenizer: ChatTokenizer

    @classmethod
    def read(cls, folder: Path) -> "Policy":
        """Read a model folder. Raises PretrainedError naming the file and what is wrong with it."""
        model, params = pretrained.read(folder)
        path = folder / "tokenizer.json"
        try:
            tokenizer = ChatTokenizer.load(path)
        except OSError as error:
            raise PretrainedError(f"{path}: cannot be read ({error.strerror}); a policy's folder needs its tokenizer") from error
        except Exception as error:
            raise PretrainedError(f"{path}: not a tokenizer file: {error}") from error
        return cls(model, params, tokenizer)

    def write(self, folder: Path, *, context_limit: int) -> None:
        """Write the folder that `read` reads, and that vLLM and transformers load as a chat model. Whole, or not at all."""
        chat = pretrained.Chat(self.tokenizer.text, CHAT_TEMPLATE, "<|im_end|>", "<|endoftext|>", context_limit)
        pretrained.write(folder, self.model, self.params, chat)
