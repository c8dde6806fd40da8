"""A policy as training hands it around: weights, and the tokenizer and chat template they speak. On disk it is a Hugging Face folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl_jax.chat.renderer import OURS
from agentrl_jax.chat.template import ChatTemplate, TemplateError
from agentrl_jax.chat.tokenizer import ChatTokenizer
from agentrl_jax.models import pretrained
from agentrl_jax.models.decoder import ModelConfig, Params
from agentrl_jax.models.hf_config import PretrainedError, load_json


@dataclass(frozen=True)
class Policy:
    """model: shape of the decoder; params: its weights; tokenizer: text to ids and back; template: of its conversations."""

    model: ModelConfig
    params: Params
    tokenizer: ChatTokenizer
    template: ChatTemplate = OURS

    @classmethod
    def read(cls, folder: Path, sharding: pretrained.ShardingFn = pretrained.on_one_device) -> "Policy":
        """Read a model folder, its weights onto the devices that `sharding` names. Raises PretrainedError: which file, what is wrong."""
        model, params = pretrained.read(folder, sharding)
        path = folder / "tokenizer.json"
        try:
            tokenizer = ChatTokenizer.load(path)
        except OSError as error:
            raise PretrainedError(f"{path}: cannot be read ({error.strerror}); a policy's folder needs its tokenizer") from error
        except Exception as error:
            raise PretrainedError(f"{path}: not a tokenizer file: {error}") from error
        return cls(model, params, tokenizer, read_template(folder, tokenizer))

    def write(self, folder: Path, *, context_limit: int) -> None:
        """Write the folder that `read` reads, and that vLLM and transformers load as a chat model. Whole, or not at all."""
        end, *others = self.template.stop
        padding = "<|endoftext|>" if self.tokenizer.has("<|endoftext|>") else end
        chat = pretrained.Chat(self.tokenizer.text, self.template.source, end, padding, context_limit, tuple(others), self.template.bos)
        pretrained.write(folder, self.model, self.params, chat)


def read_template(folder: Path, tokenizer: ChatTokenizer) -> ChatTemplate:
    """The chat template of a model folder: chat_template.jinja, else tokenizer_config.json's, else ours where the tokenizer can write it.

    Its stop tokens are the `eos_token_id`s of generation_config.json, else of config.json. Raises PretrainedError.
    """
    settings = _json(folder / "tokenizer_config.json")
    source = _source(folder, settings)
    if source is None:
        missing = [token for token in ("<|im_start|>", "<|im_end|>") if not tokenizer.has(token)]
        if missing:
            raise PretrainedError(
                f"{folder}: no chat_template.jinja, and tokenizer.json has no {missing[0]} for ours; add the model's template"
            )
        return OURS
    ids = _json(folder / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = _json(folder / "config.json").get("eos_token_id")
    stop = dict.fromkeys(tokenizer.decode([i]) for i in (ids if isinstance(ids, list) else [] if ids is None else [ids]))
    if _token(settings.get("eos_token")):
        stop |= {_token(settings.get("eos_token")): None}
    unknown = [token for token in stop if not tokenizer.has(token)]
    if unknown or not stop:
        raise PretrainedError(f"{folder}: generation_config.json's eos_token_id must name added tokens of tokenizer.json, got {unknown}")
    template = ChatTemplate(source, tuple(stop), _token(settings.get("bos_token")))
    try:
        end = template.layout().end
    except TemplateError as error:
        raise PretrainedError(f"{folder}: {error}; correct chat_template.jinja, or eos_token_id in generation_config.json") from error
    return replace(template, stop=(end, *(token for token in stop if token != end)))


def _source(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # one for each purpose
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("tool_use", named.get("default"))
    return found


def _token(value: Any) -> str:
    """A special token as tokenizer_config.json names it: a string, an object with `content`, or null."""
    return (value["content"] if isinstance(value, dict) else value) or ""


def _json(path: Path) -> dict[str, Any]:
    return load_json(path) if path.exists() else {}
