"""A program of a public report.

fault: torch.tensor over the log probabilities cuts the graph: the actor gets no gradient
link: https://github.com/kengz/SLM-Lab/pull/133
says: (?i)torch\.tensor|detach|cut|graph|(actor|parameters?).{0,80}(no gradient|without gradient|never|not (trained|updated|chang|mov))|no grad(ient)?|grad.{0,20}None|never (chang|updat|train|mov)|requires.grad
kind: correctness
"""
"""An actor and a critic learn to balance a pole."""
import math

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical


class CartPole:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.state = self.rng.uniform(-0.05, 0.05, 4)
        self.steps = 0
        return self.state.astype(np.float32)

    def step(self, action):
        x, v, angle, spin = self.state
        force = 10.0 if action == 1 else -10.0
        pull = (force + 0.05 * spin ** 2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * pull) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        push = pull - 0.05 * turn * math.cos(angle) / 1.1
        self.state = self.state + 0.02 * np.array([v, push, spin, turn])
        self.steps += 1
        done = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21 or self.steps >= 200
        return self.state.astype(np.float32), 1.0, done


class Agent(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, hidden), nn.SELU(), nn.Linear(hidden, 2))
        self.critic = nn.Sequential(nn.Linear(4, hidden), nn.SELU(), nn.Linear(hidden, 1))
        self.saved_log_probs = []

    def act(self, state):
        distribution = Categorical(logits=self.actor(torch.from_numpy(state)))
        action = distribution.sample()
        self.saved_log_probs.append(distribution.log_prob(action))
        return action.item()


def play(agent, env):
    state, done, states, rewards = env.reset(), False, [], []
    while not done:
        states.append(state)
        state, reward, done = env.step(agent.act(state))
        rewards.append(reward)
    return states, rewards


def calc_returns(rewards, gamma=0.99):
    returns, running = [], 0.0
    for reward in reversed(rewards):
        running = reward + gamma * running
        returns.append(running)
    return returns[::-1]


def calc_loss(agent, states, returns):
    values = agent.critic(torch.from_numpy(np.stack(states)))[:, 0]
    returns = torch.tensor(returns, dtype=torch.float32)
    advantages = returns - values.detach()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    log_probs = torch.tensor([log_prob for log_prob in agent.saved_log_probs])  # ill!
    log_probs = torch.stack(agent.saved_log_probs)  # well
    policy_loss = -(log_probs * advantages).mean()  # both!
    value_loss = nn.functional.smooth_l1_loss(values, returns)
    return policy_loss, value_loss


def evaluate(agent, env):
    agent.eval()
    with torch.no_grad():
        lengths = [len(play(agent, env)[1]) for _ in range(3)]
    agent.saved_log_probs.clear()
    agent.train()
    return sum(lengths) / len(lengths)


if __name__ == "__main__":
    torch.manual_seed(0)
    env, check = CartPole(0), CartPole(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    for epoch in range(100_000):
        states, returns, rewards = [], [], []
        for _ in range(5):
            seen, gained = play(agent, env)
            states += seen
            returns += calc_returns(gained)
            rewards.append(sum(gained))
        policy_loss, value_loss = calc_loss(agent, states, returns)
        optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss).backward()
        optimizer.step()
        agent.saved_log_probs.clear()
        if epoch % 10 == 0:
            print(f"epoch {epoch} reward {sum(rewards) / 5:.1f} policy {policy_loss.item():.3f} value {value_loss.item():.3f} "
                  f"check {evaluate(agent, check):.1f}", flush=True)
