"""Deep Q-learning: a dueling network, a target loaded from it every few steps, the Huber loss of gathered values."""

import copy

import torch
from torch import nn
from torch.nn import functional as F


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.ReLU())
        self.value, self.advantage = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, state):
        hidden = self.body(state)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(-1, keepdim=True)


def train(dispatch):
    online = Dueling()
    target = copy.deepcopy(online).eval()
    optimizer = torch.optim.AdamW(online.parameters(), lr=1e-3, amsgrad=True)
    dispatch(online, torch.randn(32, 4), on_miss="compile")
    dispatch(target, torch.randn(32, 4), on_miss="compile")
    step = 0
    while True:
        state, action, reward = torch.randn(32, 4), torch.randint(3, (32, 1)), torch.randn(32)
        following, done = state + 0.1 * torch.randn(32, 4), torch.rand(32) < 0.1
        with torch.no_grad():
            best = online(following).argmax(1, keepdim=True)
            wanted = reward + 0.99 * target(following).gather(1, best).squeeze(1) * ~done
        loss = F.smooth_l1_loss(online(state).gather(1, action).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            target.load_state_dict(online.state_dict())
        yield loss
