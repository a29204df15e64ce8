// SPDX-License-Identifier: Apache-2.0

package main

import (
	"hash/maphash"
	"maps"
	"slices"

	"github.com/anishathalye/porcupine"
)

// ordered is what the sidecars promise: all changes, and every answer that there is no value, are
// linearizable. A value that is read may be an earlier one, but each client sees one history, of
// all keys together, that never goes back and holds its own changes.
//
// The state is that history, and how far of it each client has seen for certain. Of the places
// where a client may have read a value the first one binds it least, hence it is the one to take.
type story struct {
	changes []entry
	seen    map[int]int
	hash    uint64
}

type entry struct {
	key   string
	value value
}

var seed = maphash.MakeSeed()

func ordered() porcupine.Model {
	return porcupine.Model{
		Partition: byKey,
		Init:      func() interface{} { return story{seen: map[int]int{}} },
		Step: func(state, input, _ interface{}) (bool, interface{}) {
			s, r := state.(story), input.(record)
			if !looks[r.Op] {
				after, answer := change(s.at(r.Key, len(s.changes)), r)
				return answered(answer, r), s.changed(r, after)
			}
			absent := r.Output == nil && r.Op == "get" || r.Op == "check" && *r.Output == notReady
			if absent && !agrees(s.at(r.Key, len(s.changes)), r) {
				return false, s
			}
			for place := s.seen[r.Client]; place <= len(s.changes); place++ {
				if agrees(s.at(r.Key, place), r) {
					return true, s.saw(r.Client, place)
				}
			}
			return false, s
		},
		Equal: func(one, other interface{}) bool {
			a, b := one.(story), other.(story)
			return a.hash == b.hash && slices.Equal(a.changes, b.changes) && maps.Equal(a.seen, b.seen)
		},
		Hash:              func(state interface{}) uint64 { return state.(story).hash },
		DescribeOperation: describe,
	}
}

// at gives what a key held after so many changes.
func (s story) at(key string, changes int) value {
	for i := changes - 1; i >= 0; i-- {
		if s.changes[i].key == key {
			return s.changes[i].value
		}
	}
	return value{}
}

func (s story) changed(r record, after value) story {
	if after != s.at(r.Key, len(s.changes)) || r.Op == "set" {
		s.changes = append(slices.Clip(s.changes), entry{r.Key, after})
	}
	return s.saw(r.Client, len(s.changes))
}

func (s story) saw(client, place int) story {
	if s.seen[client] != place {
		s.seen = maps.Clone(s.seen)
		s.seen[client] = place
	}
	s.hash = uint64(len(s.changes))
	for _, one := range s.changes[max(0, len(s.changes)-8):] {
		s.hash = s.hash*31 + maphash.Comparable(seed, one)
	}
	for client, place := range s.seen {
		s.hash += maphash.Comparable(seed, [2]int{client, place})
	}
	return s
}

func byKey(history []porcupine.Operation) [][]porcupine.Operation {
	index := map[string]int{}
	var parts [][]porcupine.Operation
	for _, operation := range history {
		key := operation.Input.(record).Key
		at, known := index[key]
		if !known {
			at = len(parts)
			index[key] = at
			parts = append(parts, nil)
		}
		parts[at] = append(parts[at], operation)
	}
	return parts
}

func describe(input, _ interface{}) string { return input.(record).String() }
