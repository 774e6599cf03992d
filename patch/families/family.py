"""The interface of a family: everything that depends on a `model_type` of transformers."""

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
    """The name of the class in transformers, as in config.json's `architectures`."""
    traits: Traits
    presets: Mapping[str, Fields] = field(default_factory=dict)
    """MODEL_SIZE -> fields; a field that a size leaves out keeps its default."""

    @property
    @abstractmethod
    def has_window(self) -> bool:
        """Whether the layers of its models may have a sliding window."""

    @abstractmethod
    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """ModelConfig's fields from a config.json of this family.

        Raises:
            ConfigError: the model has something that is not supported; the message names the key.
        """

    @abstractmethod
    def write_type(self, described: dict[str, Any], model: ModelShape) -> None:
        """Set the keys of config.json that state the family and the model's traits.

        Args:
            described: the contents of config.json, changed in place.
            model: the model to describe.
        """

    @abstractmethod
    def write_shape(self, described: dict[str, Any], model: ModelShape, fields: Set[str]) -> None:
        """Set the keys of config.json that depend on some fields of the model, except those of `write_type`.

        Args:
            described: the contents of config.json, changed in place.
            model: the model to describe.
            fields: names of the fields whose keys are set.
        """

    @abstractmethod
    def weights(self, model: ModelShape) -> tuple[WeightRow, ...]:
        """Every parameter of the model, in the order in which Hugging Face stores them.

        A tied output layer is included too, under the embedding's Hugging Face name.
        """

    def computes(self, model: ModelShape) -> bool:
        """Whether the family's class in transformers computes this model."""
        return self.traits == traits_of(model) and (self.has_window or model.window_size is None)
