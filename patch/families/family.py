"""What a family is: everything that depends on a `model_type` of transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from patch.families.config_reader import ConfigReader
from patch.families.shape import Fields, ModelShape, Traits, traits_of
from patch.families.weights import WeightRow


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """One `model_type`: its config.json in both directions, its layers, its weights, its public sizes."""

    model_type: str
    architecture: str
    """The class in transformers, as config.json's `architectures` spells it."""
    traits: Traits
    presets: Mapping[str, Fields] = field(default_factory=dict)
    """MODEL_SIZE -> fields; a field that a size leaves out keeps its default."""

    @property
    @abstractmethod
    def has_window(self) -> bool:
        """Whether the layers of its models may have a sliding window."""

    @abstractmethod
    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """ModelConfig's fields by a config.json of this family.

        Raises:
            ConfigError: the model has something that is not supported (names the key).
        """

    @abstractmethod
    def write_type(self, described: dict[str, Any], model: ModelShape) -> None:
        """Set the keys of config.json that say which family it is and which traits it has."""

    @abstractmethod
    def write_shape(self, described: dict[str, Any], model: ModelShape, fields: Set[str]) -> None:
        """Set the keys of config.json that these fields of the model decide; the type's keys aside."""

    @abstractmethod
    def weights(self, model: ModelShape) -> tuple[WeightRow, ...]:
        """Every parameter of such a model, in the order in which Hugging Face stores them.

        The output layer is among them also where it is tied: with the embedding's Hugging Face name.
        """

    def computes(self, model: ModelShape) -> bool:
        """Whether its class in transformers computes this model."""
        return self.traits == traits_of(model) and (self.has_window or model.window_size is None)
