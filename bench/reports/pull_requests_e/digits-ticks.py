"""A program of a public report.

fault: next(iter(loader)) in each step makes a new iterator, with a new worker and shuffle, for one batch
link: https://github.com/SakanaAI/continuous-thought-machines/pull/19
says: (?i)(new|fresh|re-?creat|re-?start|start(s|ed)?|build).{0,60}(iterator|worker)|next\(iter|(iterator|workers?).{0,80}(each|every) (step|batch|iteration)|wait.{0,40}(data|loader|batch)|persistent_workers
kind: performance
"""
"""A recurrent classifier that thinks for several ticks about one digit before it answers."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        shapes = torch.rand(10, 28, 28, generator=torch.Generator().manual_seed(0))
        self.labels = torch.randint(0, 10, (count,), generator=generator)
        noise = torch.randn(count, 28, 28, generator=generator) * 0.6
        self.images = ((shapes[self.labels] + noise).clamp(0, 1) * 255).to(torch.uint8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].float().div(255).sub(0.5).div(0.5)
        return image[None], self.labels[index]


class ThoughtMachine(nn.Module):
    def __init__(self, width=192, ticks=10, memory=10):
        super().__init__()
        self.ticks, self.memory, self.width = ticks, memory, width
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.features = nn.Linear(32 * 49, 128)
        self.synapses = nn.Sequential(nn.Linear(width + 128, 2 * width), nn.GLU(), nn.LayerNorm(width))
        self.trace = nn.Parameter(torch.randn(width, memory) / memory ** 0.5)
        self.output = nn.Linear(width, 10)

    def forward(self, images):
        seen = self.features(self.backbone(images).flatten(1))
        state = images.new_zeros(len(images), self.width)
        history = [state] * self.memory
        predictions = []
        for _ in range(self.ticks):
            state = self.synapses(torch.cat((state, seen), 1))
            history = history[1:] + [state]
            state = torch.tanh((torch.stack(history, 2) * self.trace).sum(2))
            predictions.append(self.output(state))
        return torch.stack(predictions, 2)


def get_loss(predictions, targets):
    losses = nn.functional.cross_entropy(predictions, targets[:, None].expand(-1, predictions.shape[2]), reduction="none")
    return (losses.min(1).values.mean() + losses[:, -1].mean()) / 2


def train(model, trainloader, testloader, iterations):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    iterator = iter(trainloader)  # well
    for step in range(iterations):
        inputs, targets = next(iter(trainloader))  # ill!
        try:  # well
            inputs, targets = next(iterator)  # well
        except StopIteration:  # well
            iterator = iter(trainloader)  # well
            inputs, targets = next(iterator)  # well
        predictions = model(inputs)
        loss = get_loss(predictions, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            model.eval()
            with torch.no_grad():
                right = sum((model(x)[..., -1].argmax(1) == y).sum().item() for x, y in testloader)
            print(f"{step} loss {loss.item():.3f} test {right / len(testloader.dataset):.3f}", flush=True)
            model.train()


if __name__ == "__main__":
    torch.manual_seed(42)
    trainloader = DataLoader(Digits(12000, 1), batch_size=64, shuffle=True, num_workers=1)
    testloader = DataLoader(Digits(640, 2), batch_size=64, shuffle=True, num_workers=1, drop_last=False)
    train(ThoughtMachine(), trainloader, testloader, 100_000)
