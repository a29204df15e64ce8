// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/anishathalye/porcupine"

// linearizable is one register for each key: every operation happens at one moment between its
// call and its return.
func linearizable() porcupine.Model {
	return porcupine.Model{
		Partition: byKey,
		Init:      func() interface{} { return value{} },
		Step: func(state, input, _ interface{}) (bool, interface{}) {
			now, r := state.(value), input.(record)
			if looks[r.Op] {
				return agrees(now, r), now
			}
			after, answer := change(now, r)
			return answered(answer, r), after
		},
		DescribeOperation: describe,
	}
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
