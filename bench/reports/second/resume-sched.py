"""A program of a public report.

fault: The checkpoint holds model and optimizer but not the LR scheduler, so a resumed run restarts warmup and cosine decay.
link: https://github.com/PolymathicAI/the_well/issues/77
says: (?is)(schedul\w*|LambdaLR|learning rate|\blr\b|warm-?up|cosine).{0,300}(state|checkpoint|resum|restor|saved?|restart|reset|load|jump|starts? (over|again)|from (the )?(start|beginning|zero|0)|last_epoch|went (back|up)|rose|rises|not contin)|(checkpoint|resum|restor|state_dict).{0,300}(schedul|learning rate|\blr\b|warm-?up)
kind: correctness
"""
"""Surrogate for a 1D diffusion equation; jobs have a time limit and resume from the last checkpoint."""
import math
import os
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def simulate(n, seed, points=64, steps=20):
    g = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 2 * math.pi, points + 1)[:-1]
    k = torch.arange(1, 6)
    a, b = torch.randn(n, 5, generator=g), torch.randn(n, 5, generator=g)
    u0 = (a[:, :, None] * torch.sin(k[:, None] * x) + b[:, :, None] * torch.cos(k[:, None] * x)).sum(1) / 3
    u = u0.clone()
    for _ in range(steps):
        u = u + 0.2 * (u.roll(1, 1) - 2 * u + u.roll(-1, 1)) - 0.05 * u * (u.roll(-1, 1) - u.roll(1, 1))
    return TensorDataset(u0[:, None], u[:, None])


class Surrogate(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        conv = lambda i, o: nn.Conv1d(i, o, 7, padding=3, padding_mode="circular")
        self.net = nn.Sequential(conv(1, c), nn.GELU(), conv(c, c), nn.GELU(), conv(c, c), nn.GELU(), conv(c, 1))

    def forward(self, x):
        return x + self.net(x)


class Trainer:
    def __init__(self, checkpoint_folder, model, train_loader, val_loader, optimizer, lr_scheduler, max_epoch):
        self.checkpoint_folder = checkpoint_folder
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self.train_loader, self.val_loader = train_loader, val_loader
        self.starting_epoch, self.max_epoch = 1, max_epoch
        self.best_val_loss = None
        self.loss_fn = nn.MSELoss()

    def save_model(self, epoch, validation_loss, output_path):  # both!
        torch.save(  # both!
            {
                "epoch": epoch,
                "model_state_dict": self.model.state_dict(),  # both!
                "optimizer_state_dict": self.optimizer.state_dict(),  # both!
                "lr_scheduler_state_dict": self.lr_scheduler.state_dict(),  # well
                "validation_loss": validation_loss,
                "best_validation_loss": self.best_val_loss,  # both!
            },
            output_path,  # both!
        )

    def load_checkpoint(self, checkpoint_path):  # both!
        checkpoint = torch.load(checkpoint_path, weights_only=True)
        self.model.load_state_dict(checkpoint["model_state_dict"])
        self.optimizer.load_state_dict(checkpoint["optimizer_state_dict"])  # both!
        self.lr_scheduler.load_state_dict(checkpoint["lr_scheduler_state_dict"])  # well
        self.best_val_loss = checkpoint["best_validation_loss"]
        self.starting_epoch = checkpoint["epoch"] + 1  # both!

    def train_one_epoch(self):
        self.model.train()
        epoch_loss = 0.0
        for x, y in self.train_loader:
            loss = self.loss_fn(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            epoch_loss += loss.item() / len(self.train_loader)
        self.lr_scheduler.step()  # both!
        return epoch_loss

    @torch.inference_mode()
    def validation_loop(self):
        self.model.eval()
        return sum(self.loss_fn(self.model(x), y).item() for x, y in self.val_loader) / len(self.val_loader)

    def train(self, time_limit_epochs):
        for epoch in range(self.starting_epoch, self.max_epoch + 1):
            lr = self.optimizer.param_groups[0]["lr"]
            train_loss = self.train_one_epoch()
            val_loss = self.validation_loop()
            print(f"Epoch {epoch}/{self.max_epoch}: lr {lr:.2e} train {train_loss:.6f} valid {val_loss:.6f}")
            if self.best_val_loss is None or val_loss < self.best_val_loss:
                self.best_val_loss = val_loss
                self.save_model(epoch, val_loss, os.path.join(self.checkpoint_folder, "best.pt"))
            self.save_model(epoch, val_loss, os.path.join(self.checkpoint_folder, "recent.pt"))
            if epoch - self.starting_epoch + 1 >= time_limit_epochs:
                print("time limit reached, job ends")
                return


def run_job(folder, seed, max_epoch=12, warmup=2, time_limit_epochs=6):
    torch.manual_seed(seed)
    train_loader = DataLoader(simulate(640, 1), batch_size=32, shuffle=True)
    val_loader = DataLoader(simulate(128, 2), batch_size=64)
    model = Surrogate()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = lambda e: (e + 1) / warmup if e < warmup else \
        0.5 * (1 + math.cos(math.pi * (e - warmup) / (max_epoch - warmup)))
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)  # both!
    trainer = Trainer(folder, model, train_loader, val_loader, optimizer, lr_scheduler, max_epoch)
    recent = os.path.join(folder, "recent.pt")
    if os.path.exists(recent):
        trainer.load_checkpoint(recent)  # both!
    trainer.train(time_limit_epochs)


if __name__ == "__main__":
    experiment = tempfile.mkdtemp()
    for job in range(2):
        run_job(experiment, seed=job)
