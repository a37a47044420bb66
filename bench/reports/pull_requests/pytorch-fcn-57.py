"""A segmenter that validates in the middle of an epoch.

fault: the validation leaves the model in evaluation mode for the rest of the epoch
codes: FL016
kind: performance
"""
import torch
from torch import nn


class Trainer:
    def __init__(self, model):
        self.model, self.iteration = model, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.images, self.labels = torch.rand(512, 3, 32, 32), torch.randint(0, 5, (512, 32, 32))

    def validate(self):
        training = self.model.training  # well
        self.model.eval()  # ill!
        self.model.eval()  # well
        with torch.no_grad():
            loss = nn.functional.cross_entropy(self.model(self.images[:64]), self.labels[:64])
        print(self.iteration, loss.item())
        if training:  # well
            self.model.train()  # well

    def train_epoch(self):
        self.model.train()  # ill!
        self.model.train()  # well
        for at in torch.randperm(len(self.images)).repeat(20).split(16):
            if self.iteration % 15 == 0:
                self.validate()  # ill!
                self.validate()  # well
            self.iteration += 1
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.images[at]), self.labels[at])  # ill!
            loss = nn.functional.cross_entropy(self.model(self.images[at]), self.labels[at])  # well
            loss.backward()
            self.optimizer.step()


torch.manual_seed(0)
trainer = Trainer(nn.Sequential(nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.5), nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 5, 1)))
for epoch in range(1000):
    trainer.train_epoch()
