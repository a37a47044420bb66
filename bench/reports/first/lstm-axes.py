"""A program of a public report.

fault: Batch-first input (B, T, F) is fed to an nn.LSTM without batch_first=True, so the recurrence runs over the samples of the batch and not over time.
link: https://github.com/yunjey/pytorch-tutorial/issues/196
says: (?is)batch_first|(lstm|rnn|recurr).{0,300}(batch (axis|dim|as)|(over|across|along) the (batch|samples|examples)|axis|axes|swapp|transpos|time[- ]first|seq\w* first|sequence dimension)|(samples?|examples?|rows?|predictions?|outputs?).{0,200}(mix|leak|depend|influenc|affect).{0,200}(other|another|each other|neighbou?r|rest of the batch)
kind: correctness
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sequence_length, input_size, hidden_size, num_classes = 20, 6, 48, 4


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers=1)  # ill!
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers=1, batch_first=True)  # well
        self.fc = nn.Linear(hidden_size, num_classes)

    def forward(self, x):
        out, _ = self.lstm(x)  # both!
        return self.fc(out[:, -1, :])  # both!


def make(n):
    """The class is the channel that carries a pulse somewhere in the first three quarters."""
    y = torch.randint(0, num_classes, (n,))
    x = 0.3 * torch.randn(n, sequence_length, input_size)
    when = torch.randint(0, 15, (n,))
    x[torch.arange(n), when, y] += 3.0
    return x, y


torch.set_num_threads(1)
torch.manual_seed(0)
train_loader = DataLoader(TensorDataset(*make(2000)), batch_size=50, shuffle=True)
test_loader = DataLoader(TensorDataset(*make(500)), batch_size=50)
model = RNN()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(6):
    model.train()
    for i, (images, labels) in enumerate(train_loader):
        outputs = model(images)  # both!
        loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test_loader)
    print(f"Epoch [{epoch + 1}/6] loss {loss.item():.4f}  test accuracy {100 * correct / 500:.1f} %")
