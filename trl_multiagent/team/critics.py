"""
Critics: value models that are trained with a team and are part of its module.

A critic reads a sequence of tokens with a backbone, and its head turns the hidden state of the last token into a
number. The forms differ in the backbone:

- `"model"`: every critic has a backbone of its own, all of which is trained.
- `"adapter"`: every critic has a LoRA adapter on the base of a LoRA team's agents.
- `"head"`: the backbone is the agent's own. Only the head belongs to the critic.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.trainer.utils import create_model_from_path, get_config_model_id

from trl_multiagent.folders import CRITICS_FOLDER, read_json, write_json
from trl_multiagent.models.adapter_config import check_saved_adapter
from trl_multiagent.models.gguf import converted
from trl_multiagent.models.packaged import load_as_published, packaged
from trl_multiagent.models.packing import mask_of
from trl_multiagent.models.pretrained import (
    adapter_parameters,
    base_of,
    copied,
    outside_of_text,
    seeded,
    text_model,
    without_router_logits,
)
from trl_multiagent.models.shared_prompts import takes_positions, token_positions
from trl_multiagent.team.adapters import load_adapter_weights, save_adapter
from trl_multiagent.team.files import load_tokenizer, part_of, save_model


CRITICS_FILE = "critics.json"
HEAD_FILE = "value_head.safetensors"
SHARE_OF_BATCH = 0.1  # of the newest batch in the running means


@dataclass
class Scale:
    """
    The running mean and variance of a critic's targets. The critic's value is `mean + std * output of the head`, so
    that a new critic predicts the mean of the recent targets, because its head returns zero.
    """

    weight: float = 0.0  # 1 - 0.9^n after n batches
    mean: float = 0.0  # a sum over the batches, weighted by how recent they are
    mean_of_squares: float = 0.0  # the same

    def update(self, mean: float, mean_of_squares: float) -> None:
        """Adds the targets of one batch."""
        self.weight += SHARE_OF_BATCH * (1.0 - self.weight)
        self.mean += SHARE_OF_BATCH * (mean - self.mean)
        self.mean_of_squares += SHARE_OF_BATCH * (mean_of_squares - self.mean_of_squares)

    @property
    def shift_and_factor(self) -> tuple[float, float]:
        """The mean and the standard deviation (0 and 1 before the first batch)."""
        if self.weight == 0.0:
            return 0.0, 1.0
        mean = self.mean / self.weight
        return mean, max(0.0, self.mean_of_squares / self.weight - mean * mean, 1e-6) ** 0.5


@dataclass
class CriticSettings:
    """
    The settings of critics, see the arguments `critic_*` of [`ActorCriticConfig`]. Without `models`, a critic starts
    from its agent.
    """

    form: str  # "model", "adapter" or "head"
    models: str | list[str] | None
    head_hidden_dim: int | None
    lora_r: int
    seed: int


@dataclass
class Backbone:
    """The model, the tokenizer and the adapter with which a critic reads."""

    role: str  # the critic uses this agent's model, or its tokenizer
    model: Any  # the model with which the critic reads, including its adapter; first the agent's
    tokenizer: PreTrainedTokenizerBase
    key: str  # of the model in the state of the team
    adapter: str | None = None  # name of the critic's adapter
    shares_vocabulary: bool = True  # whether the tokens of the agent are tokens of the critic


class Critics(nn.Module):
    """
    The critics of a team. [`make_critics`] makes them.

    Attributes:
        names (`tuple[str, ...]`): The critics.
        models (`nn.ModuleDict`): Backbones that belong to critics alone.
        heads (`nn.ModuleDict`): The head of each critic.
        scales (`dict[str, Scale]`): The running mean and variance of each critic's targets.
    """

    def __init__(self, settings: CriticSettings, backbones: dict[str, Backbone]):
        super().__init__()
        self.settings = settings
        self.names = tuple(backbones)
        self.backbones = backbones
        self.models = nn.ModuleDict()
        self.heads = nn.ModuleDict()
        self.scales = {name: Scale() for name in self.names}

    def parameters_of(self, name: str) -> list[nn.Parameter]:
        """Returns the trained parameters of a critic, without an agent's if it uses the agent's model."""
        backbone, parameters = self.backbones[name], [*self.heads[name].parameters()]
        if backbone.adapter is not None:
            parameters += adapter_parameters(backbone.model, backbone.adapter)
        elif name in self.models:
            parameters += self.models[name].parameters()
        return parameters

    def values(
        self,
        name: str,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        readers: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Computes the outputs of a critic's head for sequences of shape `(num_rows, length)`, padded on the left, or for
        packed ones, see [`~models.packing.pack_ends`]. The team must have activated the critic.

        Returns:
            `torch.Tensor` of shape `(num_rows,)`, in float32, not yet scaled by [`Scale`].
        """
        model = base_of(self.backbones[name].model)
        options = without_router_logits(model)
        if readers is not None:
            assert position_ids is not None
            attention_mask = mask_of(readers, position_ids, model.dtype)
        elif attention_mask is not None and takes_positions(model):
            position_ids = token_positions(attention_mask)
        if position_ids is not None:
            options["position_ids"] = position_ids
        outputs = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **options)
        hidden, head = outputs.last_hidden_state, self.heads[name]
        hidden = hidden[:, -1] if ends is None else hidden.flatten(0, 1)[ends]
        with torch.autocast(hidden.device.type, enabled=False):
            return head(hidden.to(head[-1].weight.dtype)).squeeze(-1).float()

    # Files

    def save(self, folder: Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Writes `critics.json` and a folder per critic: its head, and its own backbone or adapter if it has one."""
        folder = folder / CRITICS_FOLDER
        for name, backbone in self.backbones.items():
            target = folder / name
            target.mkdir(parents=True, exist_ok=True)
            weights = part_of(state_dict, backbone.key)
            if backbone.adapter is not None:
                # PEFT names the folder like the adapter, which may be the name of another critic
                inner = target / backbone.adapter
                save_adapter(backbone.model, backbone.adapter, inner, weights)
                for file in inner.iterdir():
                    file.replace(target / file.name)
                inner.rmdir()
            elif name in self.models:
                save_model(backbone.model, target, weights)
                backbone.tokenizer.save_pretrained(target)
            head = part_of(state_dict, f"critics.heads.{name}.") or self.heads[name].state_dict()
            save_file({key: x.contiguous().cpu() for key, x in head.items()}, target / HEAD_FILE)
        scales = {name: asdict(scale) for name, scale in self.scales.items()}
        write_json(folder / CRITICS_FILE, {"critics": list(self.names), "scales": scales})

    def load(self, folder: str | Path) -> None:
        """
        Replaces the weights of the critics by those in the folder of a saved team.

        Raises:
            ValueError: the team was saved without critics, or with other ones.
        """
        path = Path(folder) / CRITICS_FOLDER / CRITICS_FILE
        if not path.is_file():
            raise ValueError(f"{folder} has no critics: there is no {path}.")
        saved = read_json(path)
        if saved["critics"] != list(self.names):
            raise ValueError(f"{folder} has the critics {saved['critics']}, this run has {list(self.names)}.")
        for name, backbone in self.backbones.items():
            source = path.parent / name
            if backbone.adapter is not None:
                load_adapter_weights(backbone.model, backbone.adapter, source)
            elif name in self.models:
                backbone.model.load_state_dict(load_backbone(str(source), backbone.model.dtype).state_dict())
            load_head(self.heads[name], source)
            self.scales[name] = Scale(**saved["scales"][name])


def make_critics(team: Any, roles: dict[str, str], settings: CriticSettings) -> Critics:
    """
    Makes the critics of a team. `roles`: the agent that each critic starts from. Raises `ValueError` if the settings
    do not fit.
    """
    sources = model_names(settings.models, list(roles))
    backbones = {
        name: Backbone(role, team.policies[role], team.tokenizers[role], f"models.{team._model_names[role]}.")
        for name, role in roles.items()
    }
    critics = Critics(settings, backbones)
    for name, backbone in backbones.items():
        with seeded(settings.seed, f"critic {name}"):
            if settings.form == "model":
                # The data type of trained weights
                dtype = torch.float32 if isinstance(backbone.model, PeftModel) else base_of(backbone.model).dtype
                backbone.model = critics.models[name] = load_or_copy(backbone, sources[name], dtype)
                backbone.key = f"critics.models.{name}."
            elif settings.form == "adapter":
                if not isinstance(backbone.model, PeftModel):
                    raise ValueError(
                        f"`critic_form='adapter'` adds adapters to the bases of LoRA agents: {backbone.role!r} has no "
                        "LoRA adapter. Set `critic_form` to 'model' or 'head'."
                    )
                backbone.adapter = f"critic_{name}"
                add_adapter(backbone.model, backbone.adapter, settings)
        model, tokenizer, agents_own = backbone.model, backbone.tokenizer, team.tokenizers[backbone.role]
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        backbone.shares_vocabulary = tokenizer is agents_own or tokenizer.get_vocab() == agents_own.get_vocab()
        with seeded(settings.seed, f"critic head {name}"):
            critics.heads[name] = make_head(base_of(model), settings.head_hidden_dim)
        source = sources[name]
        if source and (Path(source) / HEAD_FILE).is_file():  # a critic that was trained before
            load_head(critics.heads[name], source)
            team_file = Path(source).parent / CRITICS_FILE
            if team_file.is_file() and (scale := read_json(team_file)["scales"].get(Path(source).name)):
                critics.scales[name] = Scale(**scale)  # of which its values are multiples
    return critics


def load_head(head: nn.Module, folder: str | Path) -> None:
    """
    Replaces the weights of a head by those in the folder of a saved critic. Raises `ValueError` if the saved head has
    other layers.
    """
    try:
        head.load_state_dict(load_file(Path(folder) / HEAD_FILE))
    except RuntimeError as error:
        raise ValueError(
            f"The value head in {folder} has other layers than `critic_value_head_hidden_dim` asks for: {error}"
        ) from error


def model_names(models: str | list[str] | None, names: Sequence[str]) -> dict[str, str | None]:
    """
    Returns the model that each critic starts from, or `None`. Raises `ValueError` if neither one for all nor one for
    each is given.
    """
    given = models if isinstance(models, list) else [models]
    given = given * len(names) if len(given) == 1 else given
    if len(given) != len(names):
        raise ValueError(f"`critic_models` has {len(given)} models for the critics {list(names)}.")
    return dict(zip(names, given, strict=True))


def load_or_copy(backbone: Backbone, source: str | None, dtype: torch.dtype) -> PreTrainedModel:
    """Loads a backbone in a data type and its tokenizer, or copies the agent's."""
    agent = base_of(backbone.model)
    if source is None and not isinstance(backbone.model, PeftModel):
        return copied(text_model(agent)).requires_grad_(True)
    hub = {}
    if source is None:
        hub["revision"] = backbone.model.peft_config[backbone.role].revision
    source = packaged(source or get_config_model_id(agent.config))
    if not source:
        raise ValueError(f"The base of {backbone.role!r} has no name to load a critic from: set `critic_models`.")
    backbone.tokenizer = load_tokenizer(source, hub)
    if agent.device.type == "meta":
        return text_model(load_as_published(source, device_map="meta", **hub))
    return load_backbone(source, dtype, **hub)


def load_backbone(name: str, dtype: torch.dtype, **hub: Any) -> PreTrainedModel:
    """Loads a model without its language-modelling head; of a composite checkpoint, the text model alone."""
    name = converted(name)
    check_saved_adapter(name)
    hub |= {"device_map": None, "dtype": dtype, "trust_remote_code": False}
    return text_model(create_model_from_path(name, AutoModel, **hub))


def add_adapter(model: PeftModel, adapter: str, settings: CriticSettings) -> None:
    """Adds the adapter of a critic to a model. The other adapters of the model stay as they are."""
    config = LoraConfig(r=settings.lora_r, lora_alpha=2 * settings.lora_r, target_modules="all-linear")
    config.exclude_modules = outside_of_text(base_of(model))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # As for agents' adapters
    model.add_adapter(adapter, config, autocast_adapter_dtype=not is_deepspeed_zero3_enabled())
    # PEFT leaves only one adapter of a model trainable
    for parameter in (*trained, *adapter_parameters(model, adapter)):
        parameter.requires_grad_(True)


def make_head(model: PreTrainedModel, hidden_dim: int | None) -> nn.Sequential:
    """
    Makes a head: a linear layer, optionally after a hidden layer with tanh. The last layer returns zero at first, so
    that a new critic predicts the mean of the targets.
    """
    size = model.config.get_text_config().hidden_size
    layers = [] if hidden_dim is None else [nn.Linear(size, hidden_dim), nn.Tanh()]
    layers.append(nn.Linear(hidden_dim or size, 1))
    nn.init.normal_(layers[0].weight, std=0.02)
    for zeros in (layers[0].bias, layers[-1].bias, layers[-1].weight):
        nn.init.zeros_(zeros)
    # ZeRO-3 gathers parameters together, so all must have the same data type
    return nn.Sequential(*layers).to(model.dtype if is_deepspeed_zero3_enabled() else torch.float32)
