"""A program of a public report.

fault: the rollout runs one forward and makes one Categorical per environment in a Python loop
link: https://github.com/entity-neural-network/incubator/pull/15
says: (?i)loop|batch(ed|ing| of (one|1)|.?size 1)|one (sample|observation|environment|forward)|vectori[sz]e|Categorical|small (operations|calls|kernels)|many (small|tiny)|per (sample|environment|observation)|get_action_and_value
kind: performance
"""
"""PPO on a field of mines: the agent embeds the entities it sees and moves its robot."""
import time

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0], [0, 0]], dtype=np.float32)


class Minefield:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.robot = self.rng.uniform(-4, 4, 2).astype(np.float32)
        self.target = self.rng.uniform(-4, 4, 2).astype(np.float32)
        self.mines = self.rng.uniform(-4, 4, (4, 2)).astype(np.float32)
        self.clock = 0
        return self.observe()

    def observe(self):
        entities = np.concatenate((self.target[None], self.mines)) - self.robot
        kinds = np.zeros((5, 1), dtype=np.float32)
        kinds[0] = 1
        return np.concatenate((entities, kinds), 1)

    def act(self, action):
        before = np.abs(self.target - self.robot).sum()
        self.robot = np.clip(self.robot + 0.5 * MOVES[action], -5, 5)
        self.clock += 1
        reward = before - np.abs(self.target - self.robot).sum() - 0.05
        hit = bool((np.abs(self.mines - self.robot).max(1) < 0.3).any())
        done = hit or self.clock >= 40 or bool(np.abs(self.target - self.robot).max() < 0.5)
        return (self.reset() if done else self.observe()), float(reward - 2 * hit), done


class Agent(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.trunk = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh())
        self.action_head, self.value_head = nn.Linear(width, len(MOVES)), nn.Linear(width, 1)

    def forward(self, entities):
        embedded = self.embedding(entities)
        hidden = self.trunk(torch.cat((embedded.mean(-2), embedded.amax(-2)), -1))
        return self.action_head(hidden), self.value_head(hidden)[..., 0]

    def get_action_and_value(self, observations):  # both!
        actions, logprobs, values = [], [], []  # ill!
        for obs in observations:  # ill!
            logits, value = self(torch.tensor(obs))  # ill!
            dist = Categorical(logits=logits)  # ill!
            action = dist.sample()  # ill!
            actions.append(action)  # ill!
            logprobs.append(dist.log_prob(action))  # ill!
            values.append(value)  # ill!
        return torch.stack(actions), torch.stack(logprobs), torch.stack(values)  # ill!
        logits, values = self(torch.from_numpy(np.stack(observations)))  # well
        dist = Categorical(logits=logits)  # well
        actions = dist.sample()  # well
        return actions, dist.log_prob(actions), values  # well


def rollout(agent, envs, obs, steps):
    store = {name: [] for name in ("obs", "actions", "logprobs", "values", "rewards", "dones")}
    for _ in range(steps):
        with torch.no_grad():
            actions, logprobs, values = agent.get_action_and_value(obs)  # both!
        store["obs"].append(torch.from_numpy(np.stack(obs)))
        results = [env.act(action) for env, action in zip(envs, actions.tolist())]
        obs = [result[0] for result in results]
        for name, value in (("actions", actions), ("logprobs", logprobs), ("values", values)):
            store[name].append(value)
        store["rewards"].append(torch.tensor([result[1] for result in results]))
        store["dones"].append(torch.tensor([float(result[2]) for result in results]))
    return obs, {name: torch.stack(value) for name, value in store.items()}


def advantages(data, last, gamma=0.97, lam=0.95):
    result, running = torch.zeros_like(data["rewards"]), 0.0
    for t in reversed(range(len(result))):
        after = last if t + 1 == len(result) else data["values"][t + 1]
        alive = 1 - data["dones"][t]
        delta = data["rewards"][t] + gamma * after * alive - data["values"][t]
        running = delta + gamma * lam * alive * running
        result[t] = running
    return result


if __name__ == "__main__":
    torch.manual_seed(0)
    envs = [Minefield(seed) for seed in range(16)]
    obs = [env.reset() for env in envs]
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-4)
    for update in range(20_000):
        begin = time.time()
        obs, data = rollout(agent, envs, obs, 48)
        with torch.no_grad():
            last = agent(torch.from_numpy(np.stack(obs)))[1]
        gain = advantages(data, last)
        returns, flat = (gain + data["values"]).flatten(), {k: v.flatten(0, 1) for k, v in data.items()}
        gain = gain.flatten()
        for _ in range(4):
            for pick in torch.randperm(len(gain)).split(128):
                logits, value = agent(flat["obs"][pick])
                dist = Categorical(logits=logits)
                ratio = (dist.log_prob(flat["actions"][pick]) - flat["logprobs"][pick]).exp()
                norm = (gain[pick] - gain.mean()) / (gain.std() + 1e-6)
                policy = -torch.min(ratio * norm, ratio.clamp(0.8, 1.2) * norm).mean()
                loss = policy + 0.5 * (value - returns[pick]).pow(2).mean() - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if update % 5 == 0:
            print(f"update {update} reward {data['rewards'].mean():.3f} sps {data['rewards'].numel() / (time.time() - begin):.0f}", flush=True)
