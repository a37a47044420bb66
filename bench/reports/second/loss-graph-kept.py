"""A program of a public report.

fault: running_loss sums loss tensors that still carry their autograd graph, so the graphs of all batches of the epoch are kept in memory.
link: https://github.com/BatsResearch/labelmodels/issues/4
says: (?is)(running_loss|loss|tensor|graph|autograd|history).{0,250}(\.item\(\)|detach|graph|memory|grad_fn|keeps?|kept|held|holds|retain|accumulat|alive|grow|leak|float\()|(memory|leak|graph).{0,250}(loss|grow|kept|held)
kind: correctness
"""
"""Generative label model: combine the votes of labelling functions without ground truth."""
import logging
import os
import tempfile

import numpy as np
import torch
from torch import nn

logging.basicConfig(level=logging.INFO, format="%(message)s")


class NaiveBayes(nn.Module):
    """p(votes, label) with an accuracy and a propensity for each labelling function."""

    def __init__(self, num_classes, num_lfs, init_acc=.9, acc_prior=0.025):
        super().__init__()
        init = np.log(init_acc / (1 - init_acc)) / 2
        self.num_classes, self.num_lfs, self.acc_prior = num_classes, num_lfs, acc_prior
        self.accuracy = nn.Parameter(torch.full((num_lfs, num_classes), float(init)))
        self.propensity = nn.Parameter(torch.zeros(num_lfs))
        self.class_balance = nn.Parameter(torch.zeros(num_classes), requires_grad=False)
        self.init_acc = init

    def _conditional_log_likelihood(self, votes):
        log_acc = torch.nn.functional.logsigmoid(2 * self.accuracy)
        log_err = torch.nn.functional.logsigmoid(-2 * self.accuracy) - np.log(self.num_classes - 1)
        log_vote = torch.nn.functional.logsigmoid(self.propensity)
        log_abstain = torch.nn.functional.logsigmoid(-self.propensity)
        jll = []
        for c in range(self.num_classes):
            hit = (votes == c + 1).float()
            miss = ((votes != c + 1) & (votes != 0)).float()
            abstain = (votes == 0).float()
            ll = hit * (log_acc[:, c] + log_vote) + miss * (log_err[:, c] + log_vote) + abstain * log_abstain
            jll.append(ll.sum(1))
        return torch.stack(jll, 1)

    def forward(self, votes):
        jll = self._conditional_log_likelihood(votes) + torch.log_softmax(self.class_balance, 0)
        return torch.logsumexp(jll, dim=1)

    def get_regularization_loss(self):
        return self.acc_prior * (self.accuracy - self.init_acc).pow(2).sum()

    @torch.no_grad()
    def get_label_distribution(self, votes):
        jll = self._conditional_log_likelihood(votes) + torch.log_softmax(self.class_balance, 0)
        return torch.softmax(jll, 1)

    def estimate(self, votes, gold, config, save_to):
        optimizer = torch.optim.Adam(self.parameters(), lr=config["lr"])
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", patience=1)
        for epoch in range(config["epochs"]):
            logging.info('Epoch {}/{}'.format(epoch + 1, config["epochs"]))
            perm = torch.randperm(len(votes))
            epoch_loss = self._train_epoch([votes[b] for b in perm.split(config["batch_size"])], optimizer)  # both!
            scheduler.step(epoch_loss)  # both!
            acc = (self.get_label_distribution(votes).argmax(1) + 1 == gold).float().mean().item()
            logging.info('Train loss: %.6f  label accuracy: %.4f', epoch_loss, acc)
            torch.save(self.state_dict(), save_to)

    def _train_epoch(self, batches, optimizer):
        self.train()
        running_loss = 0.0  # both!
        for votes in batches:
            optimizer.zero_grad()
            log_likelihood = self(votes)
            loss = -1 * torch.mean(log_likelihood)
            loss += self.get_regularization_loss()
            loss.backward()
            optimizer.step()
            running_loss += loss  # ill!
            running_loss += loss.item()  # well
        return running_loss / len(batches)  # both!


def synthetic_votes(n, num_lfs, num_classes, rng):
    gold = rng.integers(1, num_classes + 1, n)
    votes = np.zeros((n, num_lfs), dtype=np.int64)
    for j in range(num_lfs):
        acc, prop = rng.uniform(0.5, 0.9), rng.uniform(0.2, 0.6)
        wrong = (gold - 1 + rng.integers(1, num_classes, n)) % num_classes + 1
        v = np.where(rng.uniform(size=n) < acc, gold, wrong)
        votes[:, j] = np.where(rng.uniform(size=n) < prop, v, 0)
    return torch.from_numpy(votes), torch.from_numpy(gold)


if __name__ == "__main__":
    torch.manual_seed(0)
    votes, gold = synthetic_votes(16000, 25, 4, np.random.default_rng(0))
    model = NaiveBayes(num_classes=4, num_lfs=25)
    config = {"lr": 0.01, "epochs": 4, "batch_size": 32}
    model.estimate(votes, gold, config, os.path.join(tempfile.mkdtemp(), "label_model.pt"))
