"""Composing the configuration: Hydra's groups and overrides, from the conf folder of the project or of the wheel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipepart.errors import ConfigError

__all__ = ["compose_config", "conf_folder"]


def conf_folder() -> Path:
    """`conf/` inside the package (installed from a wheel), or beside it (a checkout)."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(f"the configuration folder is missing: looked for conf/train.yaml in {package} and {package.parent}")


def compose_config(overrides: Sequence[str], name: str = "train") -> DictConfig:
    """The configuration with the overrides of the command line, all references resolved."""
    import time

    if not OmegaConf.has_resolver("now"):  # Hydra's own is there only inside its main function
        OmegaConf.register_new_resolver("now", lambda pattern: time.strftime(pattern), use_cache=True)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            config = compose(name, overrides=list(overrides))
            OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip()) from error
    return config
