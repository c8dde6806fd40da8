"""vLLM's half of a weight push. It runs inside vLLM's workers, in vLLM's environment: standard library, torch, safetensors and vllm only.

vLLM imports it for `--worker-extension-cls vllm_worker.WorkerExtension`, and that registers the weight-transfer backend "safetensors". Then
one /update_weights names a safetensors file with all tensors, named and shaped as in the checkpoint, or carries it.

A call of the worker stands between two steps of its engine, which waits for it. So /update_weights only hands the file to a thread, which
reads and checks it while the engine samples; `weights_staged` tells when it is done, or what is wrong. Until /finish_weight_update the
tensors wait beside the model. Loading is one call of the worker, so that no step sees half of the weights.
"""
# pyright: reportMissingImports=false

import base64
import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class Update(WeightTransferUpdateInfo):
    """A safetensors file and the SHA-256 of its bytes, in hex. path: where it lies on this machine; or data: the file in base64."""

    sha256: str
    path: str | None = None
    data: str | None = None


class SafetensorsEngine(WeightTransferEngine):
    """What vLLM calls for the backend "safetensors". Errors reach the caller of the endpoint as HTTP 500 with their text."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = Update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The model in memory has fused and repacked its tensors; their names and shapes stand in the checkpoint it was loaded from.
        self._expected = _shapes(Path(self.model_config.model))
        if self.model_config.hf_config.tie_word_embeddings:
            self._expected.pop("lm_head.weight", None)
        self._thread = ThreadPoolExecutor(1, "weights")  # one: of two pushes the later one waits, and memory has a bound
        self._staged: Future[dict[str, torch.Tensor]] | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """Nothing to set up: there is no connection."""

    def start_weight_update(self) -> None:
        self.drop()

    def receive_weights(self, update_info: Update) -> None:
        self._staged = self._thread.submit(self._stage, update_info)

    def staged(self) -> bool:
        """Whether the weights wait beside the model. Raises ValueError, or OSError, for what cannot be loaded."""
        if self._staged is None:
            raise ValueError("no weights arrived since /start_weight_update")
        if not self._staged.done():
            return False
        self._staged.result()
        return True

    def _stage(self, update_info: Update) -> dict[str, torch.Tensor]:
        data = base64.b64decode(update_info.data or "") if update_info.path is None else Path(update_info.path).read_bytes()
        if (found := hashlib.sha256(data).hexdigest()) != update_info.sha256:
            raise ValueError(f"the weights changed on their way: SHA-256 {found}, sent {update_info.sha256}")
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(f"not a whole safetensors file: {error}") from error
        self._check(tensors)
        return tensors

    def finish_weight_update(self) -> None:
        if not self.staged():
            raise ValueError("the weights are not staged yet")
        assert self._staged is not None
        tensors, self._staged = self._staged.result(), None
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        # On CPUs the output layer multiplies by a packed copy of its matrix. Where that is the embedding, the reload leaves the copy old.
        head = getattr(self.model, "lm_head", None)
        if self.model_config.hf_config.tie_word_embeddings and head is not None and self.device.type == "cpu":
            head.quant_method.process_weights_after_loading(head)

    def drop(self) -> None:
        """Forget what was staged."""
        if self._staged is not None:
            self._staged.cancel()
        self._staged = None

    def shutdown(self) -> None:
        self.drop()
        self._thread.shutdown()

    def _check(self, tensors: dict[str, torch.Tensor]) -> None:
        if missing := self._expected.keys() - tensors.keys():
            raise ValueError(f"tensor {min(missing)} is missing ({len(missing)} of {len(self._expected)} are)")
        for name, tensor in tensors.items():
            if name not in self._expected:
                raise ValueError(f"tensor {name} has no place in the served model")
            if tuple(tensor.shape) != self._expected[name]:
                raise ValueError(f"tensor {name} is {list(tensor.shape)}, but the served model's is {list(self._expected[name])}")
            if tensor.dtype != self.model_config.dtype:
                raise ValueError(f"tensor {name} is {tensor.dtype}, but the served model is {self.model_config.dtype}")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"tensor {name} is not finite")


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a model folder."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return shapes


class WorkerExtension:
    """Becomes a base class of vLLM's worker; `publish` calls its methods by /collective_rpc."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def weights_staged(self) -> dict[str, bool]:
        return {"staged": self.weight_transfer_engine.staged()}

    def abort_weight_update(self) -> None:
        """End an update that nobody finished, such as that of a trainer which died. The model is as it was."""
        self._weight_update_active = False
        self.weight_transfer_engine.drop()


WeightTransferEngineFactory.register_engine("safetensors", SafetensorsEngine)
