"""The forward hook where ``torch.compile`` traces the model: with a graph break, for a traced hook measures nothing.

Imported when it does, for torch's compiler takes longer to import than all of this package.
"""

from kfqn_ext._torch import untraced
from kfqn_ext.extensions.hooks import go_first, watch_output

_WHY = (
    "kfqn_ext.extend has put hooks on the layers, which torch.compile runs between graphs. For one graph "
    "(fullgraph=True, torch.export) call kfqn_ext.unextend(model) first"
)
first, watch = untraced(go_first, _WHY), untraced(watch_output, _WHY)
