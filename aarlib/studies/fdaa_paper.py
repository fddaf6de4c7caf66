"""The numbers that "Beyond Routing" quotes for FDAA in its text (its tables are not at hand), laid out by domain and control."""

from typing import NamedTuple


class Quoted(NamedTuple):
    model: str
    trained_in: str
    layers: str
    tested_on: str
    against: str
    mean: float
    spread: str
    """+- over seeds, or the 95% interval over windows, as quoted; empty where neither is."""


OLMOE, DEEPSEEK = "OLMoE-1B-7B-0924", "DeepSeek-V2-Lite"
WIKI, MIXED = "WikiText-103", "WikiText-103 + C4"

PAPER = (
    Quoted(OLMOE, WIKI, "3, 7, 11, 15, pooled", "WikiText, locked", "native", -0.07626, "entirely below zero"),
    Quoted(OLMOE, WIKI, "3, 7, 11, 15, pooled", "WikiText, locked", "strongest fixed", -0.06250, ""),
    Quoted(OLMOE, WIKI, "15", "WikiText, locked", "native", -0.1926, ""),
    Quoted(OLMOE, WIKI, "all four", "WikiText, locked", "native", -0.1934, ""),
    Quoted(OLMOE, WIKI, "15", "WikiText-103 test", "native", -0.15228, "+- 0.00313"),
    Quoted(OLMOE, WIKI, "15", "WikiText-103 test", "static", -0.12099, "+- 0.00313"),
    Quoted(OLMOE, WIKI, "15", "WikiText-103 test", "permuted", -0.16375, "+- 0.00488"),
    Quoted(OLMOE, WIKI, "15, no expert outputs", "WikiText-103 test", "native", -0.01184, "+- 0.00328"),
    Quoted(OLMOE, WIKI, "15, router and id only", "WikiText-103 test", "native", -0.00377, "+- 0.00117"),
    Quoted(OLMOE, WIKI, "15", "C4 validation", "native", 0.01695, "+- 0.00090"),
    Quoted(OLMOE, MIXED, "15", "WikiText-103 test", "native", -0.19367, "[-0.20609, -0.18143]"),
    Quoted(OLMOE, MIXED, "15", "C4 validation", "native", -0.00487, "[-0.00581, -0.00390]"),
    Quoted(OLMOE, MIXED, "15", "C4 validation", "static", -0.00625, "below zero"),
    Quoted(OLMOE, MIXED, "15", "C4 validation", "permuted", -0.02251, "below zero"),
    Quoted(OLMOE, MIXED, "15", "PTB test", "native", -0.06063, "[-0.06302, -0.05826]"),
    Quoted(OLMOE, MIXED, "15", "PTB test", "static", -0.05369, ""),
    Quoted(OLMOE, MIXED, "15", "PTB test", "permuted", -0.06001, ""),
    Quoted(OLMOE, MIXED, "15", "PTB test", "temperature 2", -0.04958, ""),
    Quoted(DEEPSEEK, MIXED, "26", "WikiText-103 test", "native", -0.01747, "[-0.02061, -0.01440]"),
    Quoted(DEEPSEEK, MIXED, "26", "WikiText-103 test", "static", -0.01289, "[-0.01537, -0.01029]"),
    Quoted(DEEPSEEK, MIXED, "26", "PTB test", "native", -0.00831, "[-0.01097, -0.00587]"),
    Quoted(DEEPSEEK, MIXED, "26", "PTB test", "static", -0.00377, "[-0.00606, -0.00171]"),
    Quoted(DEEPSEEK, MIXED, "26", "C4 validation", "native", 0.00011, "[-0.00086, +0.00106]"),
)
