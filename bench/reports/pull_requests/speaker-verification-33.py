"""Embeddings of speakers, compared with the centroid of every speaker.

fault: similarities are computed in Python loops over single vectors
codes: FL153 FL165 FL118
kind: performance
"""
import torch
from torch import nn


def similarities(embedded):
    centroids = embedded.mean(1)
    found = torch.zeros(*embedded.shape[:2], len(centroids))  # ill
    for speaker, spoken in enumerate(embedded):  # ill!
        for number, utterance in enumerate(spoken):  # ill!
            for other, centroid in enumerate(centroids):  # ill!
                if other == speaker:  # ill
                    centroid = (centroid * len(spoken) - utterance) / (len(spoken) - 1)  # ill!
                found[speaker][number][other] = nn.functional.cosine_similarity(utterance, centroid, dim=0)  # ill!
    without = (embedded.sum(1, keepdim=True) - embedded) / (embedded.shape[1] - 1)  # well
    found = nn.functional.cosine_similarity(embedded.unsqueeze(2), centroids[None, None], dim=3)  # well
    own = nn.functional.cosine_similarity(embedded, without, dim=2)  # well
    found = torch.where(torch.eye(len(centroids), dtype=torch.bool)[:, None], own[..., None], found)  # well
    return found


torch.manual_seed(0)
model, projection = nn.LSTM(40, 128, 2, batch_first=True), nn.Linear(128, 64)
optimizer = torch.optim.SGD([*model.parameters(), *projection.parameters()], lr=0.01)
for step in range(100_000):
    frames = torch.randn(4 * 5, 80, 40)
    optimizer.zero_grad()
    embedded = nn.functional.normalize(projection(model(frames)[0][:, -1]), dim=1).view(4, 5, -1)
    found = similarities(embedded)  # ill!
    found = similarities(embedded)  # well
    loss = nn.functional.cross_entropy(10 * found.flatten(0, 1), torch.arange(4).repeat_interleave(5))
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
