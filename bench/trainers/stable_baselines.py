"""An agent that learns to balance a pole, trained by the PPO of Stable-Baselines3."""

from stable_baselines3 import PPO


def main():
    agent = PPO("MlpPolicy", "CartPole-v1", n_steps=512, batch_size=64, seed=0, verbose=1, device="cpu")
    agent.learn(10_000_000)


if __name__ == "__main__":
    main()
