"""Everything a run keeps, in plain files. Samplers write rounds, the trainer writes the rest."""

from oapl.store.order import Unscored as Unscored
from oapl.store.order import put_in_order as put_in_order
from oapl.store.rounds import RoundFolder as RoundFolder
from oapl.store.run import RunFolder as RunFolder
