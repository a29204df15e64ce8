// SPDX-License-Identifier: Apache-2.0

// Command porcupine-check reads a history of concurrent operations, a line of JSON each, and says
// whether it can have come from what the named model describes.
//
// Usage: porcupine-check MODEL TIMEOUT <HISTORY; MODEL is ordered or membership.
// It ends with 0 if the history is right, with 1 if it is not, and then tells where, and with 3 if
// that could not be decided in time, or within memoryMax.
package main

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// memoryMax is in bytes. A search that finds no order takes some 300 MB a second.
const memoryMax = 1 << 30

// partTime is the least that each part of a history has, also after one that took all of the time.
const partTime = time.Second

func main() {
	models := map[string]func() porcupine.Model{
		"ordered": ordered, "membership": membership,
	}
	if len(os.Args) != 3 || models[os.Args[1]] == nil {
		fail("usage: porcupine-check ordered|membership TIMEOUT <HISTORY")
	}
	timeout, err := time.ParseDuration(os.Args[2])
	if err != nil {
		fail(err)
	}
	history, err := readHistory(os.Stdin)
	if err != nil {
		fail(err)
	}
	model := models[os.Args[1]]()
	parts := [][]porcupine.Operation{history}
	if model.Partition != nil {
		parts = model.Partition(history)
		model.Partition = nil
	}
	deadline := time.Now().Add(timeout)
	illegal, unknown := false, false
	var telling sync.Mutex
	go endBeyondMemory(&telling, &illegal)
	// The hard ones last: what is wrong in others is told whatever becomes of them.
	slices.SortStableFunc(parts, func(a, b []porcupine.Operation) int { return len(a) - len(b) })
	for _, part := range parts {
		// Porcupine takes no time left for no limit at all.
		left := max(time.Until(deadline), partTime)
		result, info := porcupine.CheckOperationsVerbose(model, part, left)
		telling.Lock()
		switch result {
		case porcupine.Illegal:
			illegal = true
			tell(part, info)
		case porcupine.Unknown:
			unknown = true
			fmt.Printf("not decided within %s: %d operations\n", timeout, len(part))
		}
		telling.Unlock()
		// What one part has taken does not count against the next.
		runtime.GC()
	}
	switch {
	case illegal:
		os.Exit(1)
	case unknown:
		os.Exit(3)
	}
	fmt.Printf("%d operations in %d parts are %s\n", len(history), len(parts), os.Args[1])
}

// endBeyondMemory ends the search before the machine does: it shares that with others.
func endBeyondMemory(telling *sync.Mutex, illegal *bool) {
	var used runtime.MemStats
	for range time.Tick(50 * time.Millisecond) {
		if runtime.ReadMemStats(&used); used.HeapAlloc <= memoryMax {
			continue
		}
		// Where the machine is busy, much of it may be what nobody has collected yet.
		runtime.GC()
		if runtime.ReadMemStats(&used); used.HeapAlloc <= memoryMax {
			continue
		}
		telling.Lock()
		if *illegal {
			os.Exit(1)
		}
		fmt.Printf("not decided within %d MiB\n", memoryMax>>20)
		os.Exit(3)
	}
}

// tell prints what surrounds the first operation that fits into no order.
func tell(part []porcupine.Operation, info porcupine.LinearizationInfo) {
	var longest []porcupine.Operation
	for _, some := range info.PartialLinearizationsOperations() {
		for _, one := range some {
			if len(one) > len(longest) {
				longest = one
			}
		}
	}
	placed := map[record]bool{}
	for _, operation := range longest {
		placed[operation.Input.(record)] = true
	}
	sort.Slice(part, func(i, j int) bool { return part[i].Call < part[j].Call })
	first := 0
	for first < len(part)-1 && placed[part[first].Input.(record)] {
		first++
	}
	fmt.Printf("no order of these %d operations explains every answer; placed are %d, not the one marked:\n",
		len(part), len(longest))
	start := part[0].Call
	for i := max(0, first-25); i < min(len(part), first+15); i++ {
		r := part[i].Input.(record)
		mark, end := " ", "      ..."
		if !placed[r] {
			mark = "*"
		}
		if r.Return != nil {
			end = fmt.Sprintf("%9.3f", float64(*r.Return-start)/1e9)
		}
		fmt.Printf("%s %9.3f %s s  client %d: %s\n", mark, float64(r.Call-start)/1e9, end, r.Client, r)
	}
}

func fail(why any) {
	fmt.Fprintln(os.Stderr, "porcupine-check:", why)
	os.Exit(2)
}
