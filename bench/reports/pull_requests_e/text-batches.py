"""A program of a public report.

fault: the data iterator indexes, pads and converts the whole dataset again in each epoch
link: https://github.com/allenai/allennlp/issues/1128
says: (?i)(each|every|per) epoch.{0,80}(again|same|index|rebuil|re-?comput|batch)|again|re-?index|re-?build|re-?comput|re-?creat|repeat|cache|wait.{0,40}(data|batch|input)|\bindex(ing|ed)?\b|_create_batches|_as_tensors|_yield_one_epoch
kind: performance
"""
"""A tagger of short texts with word and character embeddings, fed by its own data iterator."""
import random
import time

import torch
from torch import nn

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Vocabulary:
    def __init__(self, texts):
        words = sorted({word.lower() for text, _ in texts for word in text})
        self.words = {word: i + 2 for i, word in enumerate(words)}
        self.letters = {letter: i + 2 for i, letter in enumerate(LETTERS + LETTERS.upper())}

    def index(self, text):
        return [self.words.get(word.lower(), 1) for word in text], [[self.letters.get(c, 1) for c in word] for word in text]


class DataIterator:
    def __init__(self, instances, vocabulary, batch_size):
        self.instances, self.vocabulary, self.batch_size = instances, vocabulary, batch_size
        self.batches = None  # well

    def _create_batches(self):  # both!
        random.shuffle(self.instances)  # both!
        indexed = [(*self.vocabulary.index(text), label) for text, label in self.instances]  # both!
        for start in range(0, len(indexed), 20 * self.batch_size):  # both!
            part = sorted(indexed[start:start + 20 * self.batch_size], key=lambda one: len(one[0]))  # both!
            for first in range(0, len(part), self.batch_size):  # both!
                yield self._as_tensors(part[first:first + self.batch_size])  # both!

    def _as_tensors(self, batch):  # both!
        length = max(len(words) for words, _, _ in batch)  # both!
        width = max(len(word) for _, letters, _ in batch for word in letters)  # both!
        words = torch.tensor([words + [0] * (length - len(words)) for words, _, _ in batch])  # both!
        letters = torch.tensor([  # both!
            [word + [0] * (width - len(word)) for word in letters] + [[0] * width] * (length - len(letters)) for _, letters, _ in batch  # both!
        ])  # both!
        return words, letters, torch.tensor([label for _, _, label in batch])

    def _yield_one_epoch(self, shuffle):  # both!
        yield from self._create_batches()  # ill!
        if self.batches is None:  # well
            self.batches = list(self._create_batches())  # well
        if shuffle:  # well
            random.shuffle(self.batches)  # well
        yield from self.batches  # well

    def __call__(self, shuffle=True):
        return self._yield_one_epoch(shuffle)


class Classifier(nn.Module):
    def __init__(self, words, letters, classes):
        super().__init__()
        self.words = nn.Embedding(words, 48, padding_idx=0)
        self.letters = nn.Embedding(letters, 16, padding_idx=0)
        self.encoder = nn.GRU(64, 64, batch_first=True, bidirectional=True)
        self.output = nn.Linear(128, classes)

    def forward(self, words, letters):
        mask = (words != 0).float()[..., None]
        encoded, _ = self.encoder(torch.cat((self.words(words), self.letters(letters).mean(2)), 2))
        return self.output((encoded * mask).sum(1) / mask.sum(1))


def make_texts(count, seed):
    rng = random.Random(seed)
    lexicon = random.Random(0)
    topics = [["".join(lexicon.choices(LETTERS, k=lexicon.randint(3, 9))) for _ in range(400)] for _ in range(6)]
    texts = []
    for _ in range(count):
        label = rng.randrange(6)
        words = [rng.choice(topics[label if rng.random() < 0.3 else rng.randrange(6)]) for _ in range(rng.randint(10, 24))]
        texts.append(([word.capitalize() if rng.random() < 0.1 else word for word in words], label))
    return texts


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    train, dev = make_texts(1500, 1), make_texts(300, 2)
    vocabulary = Vocabulary(train)
    iterator, dev_iterator = DataIterator(train, vocabulary, 48), DataIterator(dev, vocabulary, 48)
    model = Classifier(len(vocabulary.words) + 2, len(vocabulary.letters) + 2, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(5000):
        begin, losses = time.time(), []
        model.train()
        for words, letters, labels in iterator():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words, letters), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            right = sum((model(w, c).argmax(1) == y).sum().item() for w, c, y in dev_iterator(shuffle=False))
        print(f"epoch {epoch} loss {sum(losses) / len(losses):.3f} dev {right / len(dev):.3f} {time.time() - begin:.2f}s", flush=True)
