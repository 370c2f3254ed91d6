"""
A small task to start from, `task.py` and `config.yaml`, and the function behind `trl-multiagent init`, which writes
them.
"""

from pathlib import Path


FILES = ("task.py", "config.yaml")
TEMPLATES = Path(__file__).parent


def write_task(folder: str | Path) -> list[Path]:
    """
    Writes a task that trains as it is, `task.py` and `config.yaml`, to a folder, which it creates if needed. Returns
    the files. Raises `ValueError` if one of them exists already, or the folder cannot be written to.
    """
    targets = [Path(folder) / name for name in FILES]
    existing = [str(path) for path in targets if path.exists()]
    if existing:
        raise ValueError(f"{' and '.join(existing)} would be overwritten. Choose another folder.")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path in targets:
            with path.open("x") as file:  # through no link
                file.write((TEMPLATES / path.name).read_text())
    except OSError as error:
        raise ValueError(f"The task cannot be written to {folder}: {error.strerror}.") from error
    return targets
