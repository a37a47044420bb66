"""The smallest YOLO classifier of Ultralytics, from its yaml, on generated images: `ultralytics_cls.py prepare`."""

import os
import sys
from pathlib import Path

import numpy
from PIL import Image

CONFIG = Path("config").absolute()
os.environ.update(
    YOLO_OFFLINE="true", YOLO_AUTOINSTALL="false", YOLO_VERBOSE="false", YOLO_CONFIG_DIR=str(CONFIG)
)
CONFIG.mkdir(exist_ok=True)

from ultralytics import YOLO  # noqa: E402  reads them


def images(folder):
    """Writes images of two classes, darker and brighter ones."""
    rng = numpy.random.default_rng(0)
    for part, count in (("train", 64), ("val", 8)):
        for name, level in (("dark", 80), ("bright", 170)):
            place = folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = rng.normal(level, 40, (32, 32, 3)).clip(0, 255).astype("uint8")
                Image.fromarray(pixels).save(place / f"{number}.png")


def main():
    YOLO("yolo11n-cls.yaml").train(
        data="data",
        epochs=2000,
        imgsz=32,
        batch=16,
        workers=0,
        device="cpu",
        project="runs",
        plots=False,
        save=False,
        val=False,
    )


if __name__ == "__main__":
    images(Path("data")) if sys.argv[1:] == ["prepare"] else main()
