"""A small U-Net on the synthetic volumes of MONAI, trained by its SupervisedTrainer."""

import numpy
import torch
from monai.data import CacheDataset, DataLoader, create_test_image_2d
from monai.engines import SupervisedTrainer
from monai.handlers import StatsHandler
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Compose, EnsureChannelFirstd, RandFlipd, RandRotate90d, ScaleIntensityd
from monai.utils import set_determinism


def main():
    set_determinism(0)
    rng = numpy.random.RandomState(0)
    pairs = [create_test_image_2d(64, 64, num_seg_classes=1, random_state=rng) for _ in range(64)]
    both = ["image", "label"]
    transforms = Compose(
        [
            EnsureChannelFirstd(both, channel_dim="no_channel"),
            ScaleIntensityd("image"),
            RandFlipd(both, prob=0.5, spatial_axis=0),
            RandRotate90d(both, prob=0.5),
        ]
    )
    data = CacheDataset(
        [dict(zip(both, pair, strict=True)) for pair in pairs], transforms, num_workers=0, progress=False
    )
    model = UNet(2, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2))
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=2000,
        train_data_loader=DataLoader(data, batch_size=8, shuffle=True),
        network=model,
        optimizer=torch.optim.Adam(model.parameters(), 1e-3),
        loss_function=DiceLoss(sigmoid=True),
        train_handlers=[StatsHandler(output_transform=lambda output: output[0]["loss"])],
    )
    trainer.run()


if __name__ == "__main__":
    main()
