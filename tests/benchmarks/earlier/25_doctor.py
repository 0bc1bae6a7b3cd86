"""Lesson 25 as it was when an H100 measured it: what its comparison needs."""

from functools import partial

import torch
from torch.nn.functional import cross_entropy

import effgpu
from effgpu.course import workloads

device = effgpu.find_device()
size = {"batch": 64, "length": 32, "layers": 2, "width": 384, "vocabulary": 4096}


def read_norm(model):
    squares = 0
    for parameter in model.parameters():
        squares += parameter.grad.norm().item() ** 2
    return squares**0.5


def found(**size):
    model, _, _ = workloads.text_classifier(**size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(batch):
        texts, labels = batch
        texts, labels = texts.to(device), labels.to(device)
        loss = cross_entropy(model(texts), labels)
        loss.backward()
        log = loss.item(), read_norm(model)
        optimizer.step()
        optimizer.zero_grad()
        return log

    return step


def keep_norm(model):
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])


def in_16_bits(read=True, **size):
    model, _, _ = workloads.text_classifier(**size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    dtype = workloads.choose_16_bits()
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def step(batch):
        texts, labels = batch
        texts, labels = texts.to(device), labels.to(device)
        with torch.autocast(device.type, dtype):
            loss = cross_entropy(model(texts), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        log = (loss.item(), read_norm(model)) if read else (loss.detach(), keep_norm(model))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return log

    return step


def on_one_batch(training, **size):
    _, texts, labels = workloads.text_classifier(**size)
    step = training(**size)
    return lambda: step((texts, labels))


here = size if device.type == "cuda" else {}
compared = {
    "as found": partial(on_one_batch, found, **here),
    "in 16 bits": partial(on_one_batch, in_16_bits, **here),
    "mended": partial(on_one_batch, partial(in_16_bits, read=False), **here),
}
effgpu.compare(compared, name="25_doctor", full_size=size, gpus=["T4"])
