"""Says which losses and gradients change bits from run to run or with a second thread; see `test_graph.py`."""

import json
import sys
from dataclasses import replace

import torch
from torch import Tensor

from headrace.train.graph import Document, GraphOptions, TrainGraph
from headrace.train.index_loss import IndexLossSettings, index_loss
from headrace.train.losses import cross_entropy
from tests.factories import tiny_config
from tests.kernels.rows import threads
from tests.traces import differing
from tests.train.graphs import SERVED, gradients_of, lively_graph, next_tokens, token_ids


def bits_of_a_pass(graph: TrainGraph, documents: list[Document], options: GraphOptions) -> dict[str, Tensor]:
    """Return losses and gradients, with those of the indexers."""
    output = graph.forward(documents, replace(options, has_records=True))
    judged = cross_entropy(output.hidden_TD, output.head, next_tokens(documents))
    index = index_loss(graph, output, options, IndexLossSettings(), (7, 0))
    loss = judged.numerator + sum(one.numerator for one in index.values())
    return {"losses": judged.losses_T, "loss": loss.detach()} | gradients_of(loss, graph)


def main() -> None:
    """Print the names that differ as JSON; the argument is the name of the dtype."""
    options = SERVED[getattr(torch, sys.argv[1])]
    graph = lively_graph(tiny_config(vision=False, draft=False, num_experts_per_tok=4))
    documents = [Document(token_ids(count, count, 0, 9)) for count in (100, 260)]  # few tokens, each many times
    with threads(1):
        once = bits_of_a_pass(graph, documents, options)
    with threads(2):
        again = [bits_of_a_pass(graph, documents, options) for _ in range(2)]
    print(json.dumps([differing(one, once) for one in again]))


if __name__ == "__main__":
    main()
