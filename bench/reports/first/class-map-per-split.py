"""A program of a public report.

fault: Each split builds its own class-to-index mapping; validation lacks one class, so its labels are shifted against the training labels.
link: https://github.com/weecology/DeepForest/pull/1147
says: (?is)(class(es)?|labels?|names?|species|class_to_idx).{0,250}(map|index|indices|idx|encod|order|number|\bids?\b|code).{0,250}(differ|mismatch|disagree|not the same|own|separate|per split|each split|shift|inconsisten|not match|another|conflict)|(train|valid).{0,250}(differ|mismatch|disagree|inconsisten|own).{0,150}(mapping|class_to_idx|class (order|ind|numb)|label (enc|map|ind))
kind: correctness
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SPECIES = ["auk", "booby", "cormorant", "duck", "eider", "fulmar"]


class Crops(Dataset):
    """Crops with species names, in the way of an image folder."""

    def __init__(self, records, class_to_idx=None):
        if class_to_idx is None:  # both!
            class_to_idx = {c: i for i, c in enumerate(sorted({name for _, name in records}))}  # both!
        self.class_to_idx = class_to_idx
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        pixels, name = self.records[i]
        return pixels, self.class_to_idx[name]  # both!


def field_season(n, seen, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(len(SPECIES), 3, 12, 12, generator=torch.Generator().manual_seed(7))
    out = []
    for _ in range(n):
        name = seen[torch.randint(0, len(seen), (1,), generator=g).item()]
        out.append((proto[SPECIES.index(name)] + 2.0 * torch.randn(3, 12, 12, generator=g), name))
    return out


torch.set_num_threads(1)
torch.manual_seed(0)
train_set = Crops(field_season(1200, SPECIES, 0))  # both!
val_set = Crops(field_season(300, [s for s in SPECIES if s != "booby"], 1))  # ill!
val_set = Crops(field_season(300, [s for s in SPECIES if s != "booby"], 1), train_set.class_to_idx)  # well
train = DataLoader(train_set, batch_size=40, shuffle=True)
val = DataLoader(val_set, batch_size=100)

model = nn.Sequential(nn.Flatten(), nn.Linear(432, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, len(SPECIES)))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(6):
    model.train()
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        acc = sum((model(x).argmax(1) == y).sum().item() for x, y in val) / len(val_set)
    print(f"epoch {epoch}: train loss {loss.item():.3f}  val accuracy {acc:.3f}")
